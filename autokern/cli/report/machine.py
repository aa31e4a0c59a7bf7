"""The machine of a report: host, threads and memory."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch

from autokern.cli.report.page import Section
from autokern.core.settings import Settings
from autokern.core.units import sized
from autokern.core.versions import __version__
from autokern.system import host, memory_limit, threads

__all__ = ["host_section", "in_short", "memory_facts", "now", "thread_facts"]


def now() -> str:
    """Return the present time in words."""
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())


def in_short(fields: Mapping[str, Any]) -> str:
    """Return a host in a few words: processor, accelerators, threads, torch."""
    cpu, versions = fields["cpu"], fields["versions"]
    gpus = [str(gpu.get("name", gpu.get("kind", ""))) for gpu in fields.get("accelerators", [])]
    return ", ".join([str(cpu["model"]), *gpus, f"{cpu['torch_threads']} threads", f"torch {versions['torch']}"])


def host_section(fields: Mapping[str, Any], fingerprint: str) -> Section:
    """Return what was measured on: the fields of a Host, which name no machine, user or path."""
    cpu, system = fields["cpu"], fields["system"]
    facts = [
        ("processor", str(cpu["model"])),
        ("cores", f"{cpu['physical']} physical, {cpu['logical']} logical"),
        ("vector instructions", f"{cpu['capability']}; {', '.join(cpu['simd'])}"),
        ("memory", f"{fields.get('remarks', {}).get('memory_gib', '?')} GiB"),
        ("system", f"{system['os']} {system['machine']}"),
        ("accelerators", "; ".join(_accelerator(gpu) for gpu in fields.get("accelerators", [])) or "none"),
        ("versions", ", ".join(f"{name} {version}" for name, version in fields["versions"].items() if version)),
        ("autokern", __version__),
        ("fingerprint", fingerprint),
    ]
    note = "The fingerprint is a hash of these fields; measurements hold for a host of the same one."
    return Section(title="Host", facts=facts, notes=[note])


def _accelerator(gpu: Mapping[str, Any]) -> str:
    memory = sized(int(gpu["memory_mib"]) * 2**20) if "memory_mib" in gpu else ""
    return ", ".join(filter(None, (str(gpu.get("name", gpu.get("kind", ""))), memory)))


def thread_facts() -> list[tuple[str, str]]:
    """Return the numbers of threads in this process."""
    return [
        ("threads of torch", f"{threads.current()}; between operations {torch.get_num_interop_threads()}"),
        ("most that can run at once", f"{host.thread_ceiling()}, of {host.affinity()} processors that it may use"),
        ("may candidates use fewer", "yes" if threads.allowed() else "no (AUTOKERN_THREADS=off)"),
    ]


def memory_facts(settings: Settings) -> list[tuple[str, str]]:
    """Return the memory that this process has used, and what a call may take."""
    facts = [("peak of this process", sized(host.peak_memory()))]
    for device in host.current().devices:
        there = memory_limit.named(memory_limit.current(device, settings.memory), device)
        facts.append((f"a call on {device} may take", f"{sized(there.bytes)} ({there.source})"))
        if device != "cpu" and hasattr(module := torch.get_device_module(device), "max_memory_allocated"):
            facts.append((f"peak on {device}", sized(int(module.max_memory_allocated()))))
    return facts
