"""The methods, in the order of the tables."""

from benchmarks.methods import bounds, ours, vmapped, with_backpack, with_opacus
from benchmarks.methods.base import Call, DeclinedError, Method, Setting, plain

__all__ = ["METHODS", "Call", "DeclinedError", "Method", "Setting", "plain"]

METHODS = {
    method.name: method
    for family in (bounds, ours, vmapped, with_opacus, with_backpack)
    for method in family.METHODS
}
