"""Runs Python programs that a model wrote: one process without rights, limits on everything, nothing left behind."""

from vipfast.sandbox.base import Limits, Output, SandboxError
from vipfast.sandbox.pool import Sandbox, check, run_python

__all__ = ["Limits", "Output", "Sandbox", "SandboxError", "check", "run_python"]
