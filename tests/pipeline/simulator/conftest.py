"""Loads Megatron-Core as the commands do, before the tests import what needs it."""

from megatron_attnres.analysis.predictions.megatron_core import load_schedules

load_schedules()
