"""The version of gradscope, which result files record."""

VERSION = "0.1.0"
