"""What MiniOneRec's parameters stand for is there: commands, settings and remedies."""

from __future__ import annotations

import re
import shlex

import pytest

from rft.config.schema import schema
from rft_cli.records.discovery import with_settings
from rft_genrec.minionerec.names import SCRIPTS
from rft_genrec.minionerec.script_records import Script

PRESENT = [record for record in SCRIPTS if record.command in with_settings()]


@pytest.mark.parametrize("record", PRESENT, ids=lambda record: record.paths[-1])
def test_what_a_parameter_stands_for_is_a_setting(record: Script) -> None:
    settings = schema(record.command)
    for word in shlex.split(record.words):
        assert not word.startswith("--") or word[2:] in settings, word
    for parameter in record.parameters:
        assert not parameter.to or parameter.to in settings, parameter
        # a remedy that names another command is of that one
        if parameter.do.startswith("--"):
            unknown = [flag for flag in re.findall(r"--(\w+)", parameter.do) if flag not in settings]
            assert unknown == [], parameter
