"""The whole examination of this machine, its page, and the report that can be handed on."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rft.config.commands import package_records
from rft.doctor import engines, network, resources
from rft.doctor.findings import Section, as_record, page, problems_of, verdict_line
from rft.doctor.plug_ins import plug_ins
from rft.installation import devices, packages
from rft.process.cores import usable_cores
from rft.resolved import Resolved
from rft.settings import DoctorSettings, ExaminationSettings
from rft_core.durable_files import storage_errors
from rft_core.errors import PreflightError
from rft_core.secrets import scrub
from rft_engine.process.gpu_processes import nvidia_inventory
from rft_engine.registry import ENGINES


def examine(chosen: ExaminationSettings, environment: Mapping[str, str]) -> list[Section]:
    """Examine the installation and the machine; nothing is started and nothing is changed."""
    build, cards = devices.torch_here()
    gpus = devices.gpus(build, cards, devices.driver_version(), environment.get("CUDA_VISIBLE_DEVICES"))
    memory = [
        devices.Memory(
            gpu.index,
            gpu.total_mib,
            gpu.free_mib,
            tuple(devices.Holder(process.pid, process.name, process.used_mib) for process in gpu.processes),
        )
        for gpu in nvidia_inventory()
    ]
    inference = engines.engines(ENGINES.values(), packages.installed_version, has_gpu=bool(cards))
    records = list(package_records())
    added = sorted({record.package for record in records if packages.installed_version(record.package)})
    files, threads = resources.open_files_here(), environment.get("OMP_NUM_THREADS")
    meeting = [*network.variables(environment), *network.port(environment), network.own_name()]
    return [
        Section("interpreter", tuple(packages.here())),
        Section("packages", tuple(packages.requirements(plug_ins=added))),
        Section("packages for one feature alone", tuple(packages.optional(plug_ins=added))),
        Section("packages that add commands", tuple(plug_ins(records))),
        Section("devices", (*gpus, *devices.memory(memory))),
        Section("engines", (*inference, engines.cage())),
        Section(
            "machine",
            (
                *resources.disks(resources.volumes_here(chosen.save_path, environment)),
                *resources.memory(*resources.memory_here()),
                *resources.limits(files, usable_cores(), threads),
            ),
        ),
        Section("ranks", (*meeting, *network.machines(chosen.reach))),
    ]


def lines(resolved: Resolved[DoctorSettings]) -> Iterator[str]:
    """Yield the page of `rft-train doctor`; at its end the report is written, if one is asked for.

    Raises:
        PreflightError: something stands in the way of a run.
        StorageError: the report cannot be written.
    """
    chosen = resolved.settings.examination
    sections = examine(chosen, os.environ)
    yield from page(sections)
    if chosen.share:
        file = Path(chosen.share).expanduser()
        with storage_errors("write", file):
            file.write_text(report(sections), encoding="utf-8")
        yield f"the report without secrets is {file}"
    first = next(problems_of(sections), None)
    if first is not None:
        raise PreflightError(
            code="doctor.problems",
            what=verdict_line(sections),
            where=f"the first of them: {first.subject}",
            why=f"{first.value}; {first.why}",
            do=first.do,
        )


def report(sections: list[Section]) -> str:
    """Return the findings as JSON to be handed on, without what looks like a secret and without this person's home."""
    record: Any = scrub(as_record(sections))
    text = json.dumps(record, indent=1, ensure_ascii=False)
    home = str(Path.home())
    return (text if home in ("/", "") else text.replace(home, "~")) + "\n"
