"""The process gradscope runs in: its streams, signals, memory, threads and cache folder."""
