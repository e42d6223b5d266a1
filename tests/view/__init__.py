"""The page of `gradscope view`."""
