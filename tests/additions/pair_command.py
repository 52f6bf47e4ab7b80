"""A package of its own: the verb `pair` builds two models, whose sizes are two groups of one class."""

from dataclasses import dataclass, field
from pathlib import Path

from rft.config.command_record import Command
from rft.settings import BuildDataSettings, BuildOutputSettings
from rft_models.settings import BuildSettings


@dataclass(frozen=True, kw_only=True)
class PairSettings:
    """Build a large and a small model from the same texts."""

    data: BuildDataSettings
    output: BuildOutputSettings
    teacher: BuildSettings = field(default_factory=BuildSettings, metadata={"prefixed": True})
    student: BuildSettings = field(default_factory=BuildSettings, metadata={"prefixed": True})


def run(argv):
    """Build both below the directory of --save_path."""
    from rft.settings import BuildModelSettings  # here, so that pages do not wait for torch
    from rft.tiny_models.new_model import new_model
    from rft_cli.config.resolve import resolve

    settings = resolve("pair", argv).settings
    for name, sizes in (("teacher", settings.teacher), ("student", settings.student)):
        output = BuildOutputSettings(save_path=str(Path(settings.output.save_path) / name), seed=settings.output.seed)
        made = new_model(BuildModelSettings(data=settings.data, output=output, model=sizes))
        print(f"{name}: {made.num_parameters:,} parameters in {made.directory}")
    return 0


PAIR = Command(name="pair", summary="build two models", run="pair_command:run", settings="pair_command:PairSettings")
