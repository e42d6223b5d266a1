"""The command line: parse, call the library, render, exit from the result."""

from gradscope.cli.app import main

__all__ = ["main"]
