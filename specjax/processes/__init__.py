"""Run one model with several processes, of one machine or of several: process 0 leads, the others follow."""

from specjax.processes.group import Group
from specjax.processes.meeting import join

__all__ = ["Group", "join"]
