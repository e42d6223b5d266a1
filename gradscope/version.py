"""The version of gradscope, which result files record."""

VERSION = "0.2.0"
