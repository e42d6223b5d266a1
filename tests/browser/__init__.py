"""The page of `gradscope view` in a real browser: `make browser`, where there is chromium."""
