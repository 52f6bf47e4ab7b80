"""H4: values of settings, of a model's files and of data that name code; none is looked up, and none is run.

A module that leaves a mark where it is imported stands on the path of the interpreter and in the model's directory, and
the commands and expressions would leave the same mark.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.audit_events import counted_events

from rft.config.errors import SettingsError
from rft.config.schema import Setting, schema
from rft_cli.config.resolve import resolve
from rft_core.errors import RftError
from rft_models.files.directories import checked_model_directory
from rft_models.files.transformers_config import hf_config
from rft_models.policy.load import load_policy
from rft_models.tiny_models.text import build_character_model
from rft_models.tokenization.tokenizer import load_tokenizer
from rft_models.vision.processor import load_processor
from rft_trainer.data.readers.formats import read_rows

RUNS_CODE = ("os.system", "os.exec", "subprocess.Popen", "os.posix_spawn", "socket.connect", "pickle.find_class")
MODULE = "planted_code"
PLANTED = """
from pathlib import Path
Path({mark!r}).touch()
class Planted:
    def __init__(self, *arguments, **options): pass
    def __call__(self, *arguments, **options): return self
    @classmethod
    def from_pretrained(cls, *arguments, **options): return cls()
    from_dict = from_pretrained
def run(*arguments, **options): return Planted()
"""
COMMANDS = ("rl", "sft", "dpo", "rm", "pretrain")
VALUES = {
    "a path of an import": f"{MODULE}.Planted",
    "a path with a colon": f"{MODULE}:run",
    "an entry point": f"{MODULE}:Planted.from_pretrained",
    "an interpolation of the environment": "${env:PLANTED_SECRET}",
    "an interpolation of OmegaConf": "${oc.env:PLANTED_SECRET}",
    "a resolver": f"${{{MODULE}.run:1}}",
    "a variable of the shell": "$PLANTED_SECRET",
    "a variable in braces": "${PLANTED_SECRET}",
    "a command of the shell": "$(touch MARK)",
    "a command in backquotes": "`touch MARK`",
    "a command behind a semicolon": "x; touch MARK",
    "a pipe": "|touch MARK",
    "an expression of Python": f"__import__('{MODULE}').run()",
    "a lambda": f"lambda: __import__('{MODULE}')",
    "an f-string": f"{{__import__('{MODULE}')}}",
    "a format of attributes": "{0.__class__.__init__.__globals__}",
    "a template of Jinja": "{{ cycler.__init__.__globals__.os.system('touch MARK') }}",
    "a block of Jinja": f"{{% import '{MODULE}' as x %}}",
    "a template of ERB": "<%= `touch MARK` %>",
    "a tag of YAML as text": f"!!python/object/apply:{MODULE}.run []",
    "a pickle in base64": "gASVIQAAAAAAAACMBXBvc2l4lIwGc3lzdGVtlJOUjAZ0cnVlIHiUhZRSlC4=",
    "a file of code": "MODULE_FILE",
}
"""Text that a program with another reader of settings would have run."""
NODES = {
    "_target_": f"{{_target_: {MODULE}.run}}",
    "_target_ with arguments": f"{{_target_: {MODULE}.Planted, _args_: [1], _partial_: true}}",
    "class_path": f"{{class_path: {MODULE}.Planted, init_args: {{a: 1}}}}",
    "!!python/object": f"!!python/object:{MODULE}.Planted {{}}",
    "!!python/object/apply": f"!!python/object/apply:{MODULE}.run []",
    "!!python/object/new": f"!!python/object/new:{MODULE}.Planted []",
    "!!python/name": f"!!python/name:{MODULE}.run",
    "!!python/module": f"!!python/module:{MODULE}",
    "!!python/tuple": "!!python/tuple [os, system]",
    "a tag of its own": f"!{MODULE} x",
    "a tag with an address": f"!<tag:yaml.org,2002:python/name:{MODULE}.run> x",
    "a directive": f"!run [{MODULE}]",
    "an anchor that is merged": f"{{<<: {{_target_: {MODULE}.run}}}}",
}
"""Values of YAML that make objects, or that a library makes objects of."""
HEADERS = {
    "a directive of tags": f"%TAG ! tag:yaml.org,2002:python/object/apply:{MODULE}.\n---\nrun_name: !run []\n",
    "a base configuration": f"_base_: {MODULE}.py\npretrain: model\n",
    "defaults of Hydra": f"defaults:\n  - {MODULE}\npretrain: model\n",
    "a searched path": f"hydra:\n  searchpath: [pkg://{MODULE}]\npretrain: model\n",
    "an included file": f"include: {MODULE}.py\npretrain: model\n",
    "an import": f"import: {MODULE}\npretrain: model\n",
    "a name of a recipe": f"recipe: {{command: rl, name: '${{env:PLANTED_SECRET}}', _target_: {MODULE}.run}}\n",
    "a second document": f"pretrain: model\n---\nrun_name: !!python/name:{MODULE}.run\n",
}
CONFIG = {
    "auto_map of the configuration": {"auto_map": {"AutoConfig": f"{MODULE}.Planted"}},
    "auto_map of the model": {"auto_map": {"AutoModelForCausalLM": f"{MODULE}.Planted"}},
    "auto_map of another repository": {"auto_map": {"AutoConfig": f"somebody/code--{MODULE}.Planted"}},
    "an architecture": {"architectures": [f"{MODULE}.Planted"]},
    "a type of model": {"model_type": MODULE},
    "a type with code": {"model_type": MODULE, "auto_map": {"AutoConfig": f"{MODULE}.Planted"}},
    "trust": {"trust_remote_code": True, "auto_map": {"AutoConfig": f"{MODULE}.Planted"}},
    "_target_": {"_target_": f"{MODULE}.run"},
    "an attention": {"attn_implementation": f"somebody/{MODULE}", "_attn_implementation": f"somebody/{MODULE}:run"},
    "an attention inside": {"_attn_implementation_internal": f"{MODULE}:run"},
    "an activation": {"hidden_act": f"{MODULE}.run"},
    "a data type": {"torch_dtype": f"{MODULE}.run", "dtype": f"{MODULE}.run"},
    "a quantisation": {"quantization_config": {"quant_method": MODULE, "modules": [f"{MODULE}.Planted"]}},
    "a pipeline": {"custom_pipelines": {"x": {"impl": f"{MODULE}.Planted", "pt": ["AutoModel"]}}},
    "a class of the tokenizer": {"tokenizer_class": f"{MODULE}.Planted"},
    "a rope": {"rope_scaling": {"rope_type": f"{MODULE}.run", "factor": 2.0}},
}
TOKENIZER = {
    "auto_map": {"auto_map": {"AutoTokenizer": [f"{MODULE}.Planted", f"{MODULE}.Planted"]}},
    "auto_map of a class": {"tokenizer_class": "Planted", "auto_map": {"AutoTokenizer": [f"{MODULE}.Planted", None]}},
    "a class": {"tokenizer_class": f"{MODULE}.Planted"},
    "a processor": {"processor_class": f"{MODULE}.Planted"},
    "a backend": {"backend": MODULE, "tokenizer_file": f"{MODULE}.py"},
    "a special token": {"eos_token": {"__type": f"{MODULE}.Planted", "content": "x"}},
}
GENERATION = {
    "a generation": {"custom_generate": f"{MODULE}.run"},
    "a cache": {"cache_implementation": f"{MODULE}.Planted"},
    "a watermark": {"watermarking_config": {"_target_": f"{MODULE}.run"}},
}
TEMPLATES = {
    "globals of a cycler": "{{ cycler.__init__.__globals__.os.system('touch MARK') }}",
    "globals of lipsum": "{{ lipsum.__globals__['os'].popen('touch MARK').read() }}",
    "globals of a namespace": "{{ namespace.__init__.__globals__['sys'].modules['os'].system('touch MARK') }}",
    "subclasses": "{{ ''.__class__.__mro__[1].__subclasses__()[0].__init__.__globals__ }}",
    "subclasses by attr": "{{ ''|attr('__class__')|attr('__mro__')|last|attr('__subclasses__')() }}",
    "attributes by format": "{{ '{0.__class__.__init__.__globals__}'.format(cycler) }}",
    "builtins of a joiner": f"{{{{ joiner.__init__.__globals__.__builtins__.__import__('{MODULE}') }}}}",
    "the template itself": "{{ self._TemplateReference__context.cycler.__init__.__globals__.os.system('touch MARK') }}",
    "the environment": "{{ self.environment.from_string('x').module.__loader__ }}",
    "the error's function": f"{{{{ raise_exception.__globals__['__builtins__']['__import__']('{MODULE}') }}}}",
    "the clock's function": "{{ strftime_now.__globals__['sys'].modules['os'].system('touch MARK') }}",
    "a message": "{{ messages[0].__class__.__base__.__subclasses__() }}",
    "an included file": f"{{% include '{MODULE}.py' %}}",
    "an import": f"{{% import '{MODULE}.py' as x %}}{{{{ x.run() }}}}",
    "a base template": f"{{% extends '{MODULE}.py' %}}",
    "a statement": f"{{% do __import__('{MODULE}') %}}",
    "a macro's caller": "{% macro m() %}{{ caller.__globals__ }}{% endmacro %}{% call m() %}{% endcall %}",
    "a generator's frame": "{{ (messages|map('string')).gi_frame.f_globals['__builtins__'] }}",
}
ROWS = {
    "a tag": f"!!python/object/apply:{MODULE}.run []",
    "a target": {"_target_": f"{MODULE}.run"},
    "a template": "{{ cycler.__init__.__globals__.os.system('touch MARK') }}",
    "an expression": f"__import__('{MODULE}')",
    "a class of JSON": {"py/object": f"{MODULE}.Planted", "py/reduce": [{"py/type": f"{MODULE}.run"}, []]},
    "a loader": {"__class__": f"{MODULE}.Planted", "builder": f"{MODULE}.py"},
}


@pytest.fixture
def mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that is there once anything of the planted code has been run; the module can be imported."""
    path = tmp_path / "mark"
    (tmp_path / "importable").mkdir()
    (tmp_path / "importable" / f"{MODULE}.py").write_text(PLANTED.format(mark=str(path)))
    monkeypatch.syspath_prepend(str(tmp_path / "importable"))
    monkeypatch.setenv("PLANTED_SECRET", "a-secret-of-the-environment")
    monkeypatch.chdir(tmp_path)
    return path


def filled(value: Any, mark: Path) -> Any:
    """A value with the places of this test."""
    module = mark.parent / "importable" / f"{MODULE}.py"
    return json.loads(json.dumps(value).replace("MARK", str(mark)).replace("MODULE_FILE", str(module)))


def ended(mark: Path, what: str, read: Callable[[], object], ends: Counter[str]) -> Any:
    """Read, and give what was read or the error; nothing was looked up, run or sent."""
    seen = Counter[str]()
    with counted_events(seen, RUNS_CODE):
        try:
            found: Any = read()
            ends["read"] += 1
        except RftError as error:
            found = error
            ends[error.problem.code] += 1
    assert seen == {}, what
    assert not mark.exists(), what
    assert MODULE not in sys.modules, what
    return found


def test_h4_the_planted_code_leaves_its_mark_where_it_is_imported(mark: Path) -> None:
    __import__(MODULE)
    del sys.modules[MODULE]
    assert mark.exists()


def given_to_all(settings: dict[str, Setting], value: str) -> str:
    """A file in which each of these settings has this value."""
    return "".join(f"{name}: {json.dumps(value)}\n" for name in settings)


@pytest.mark.parametrize("what", VALUES)
def test_h4_a_text_that_names_code_is_plain_or_refused_in_every_setting(mark: Path, what: str) -> None:
    value, ends, kept = filled(VALUES[what], mark), Counter[str](), 0
    for command in COMMANDS:
        file = mark.with_name(f"{command}.yaml")
        settings = dict(schema(command))
        for _ in range(4):  # without what was refused, until the rest is taken
            file.write_text(given_to_all(settings, value))
            found = ended(mark, what, lambda f=file, c=command: resolve(c, ["--config", str(f)]), ends)
            if not isinstance(found, SettingsError):
                break
            text = " ".join(f"{problem.what} {problem.where} {problem.why}" for problem in found.problems)
            assert "a-secret-of-the-environment" not in text
            lines = {int(line) for problem in found.problems for line in re.findall(r"\.yaml:(\d+)", problem.where)}
            refused = {name for number, name in enumerate(settings, 1) if number in lines}
            assert refused, f"{what}: {found.problems}"
            settings = {name: setting for name, setting in settings.items() if name not in refused}
        else:
            raise AssertionError(f"{what}: {command} refuses one setting after another: {found}")
        assert {found.values[name] for name in settings} == {value}
        kept += len(settings)
    assert kept > 20, "texts stay texts"


@pytest.mark.parametrize("what", [*NODES, *HEADERS])
def test_h4_what_a_reader_of_yaml_would_make_an_object_of_is_refused(mark: Path, what: str) -> None:
    ends, file = Counter[str](), mark.with_name("settings.yaml")
    names = ["run_name", "reward", "model", "seed"]
    # what stands below `recipe` is text for people, whatever its name
    names += ["recipe"] if NODES.get(what, "").startswith("!") else []
    texts = [HEADERS[what]] if what in HEADERS else [f"pretrain: model\n{name}: {NODES[what]}\n" for name in names]
    for text in texts:
        file.write_text(text)
        found = ended(mark, what, lambda: resolve("rl", ["--config", str(file)]), ends)
        assert isinstance(found, SettingsError) or (what == "a name of a recipe" and "env" in found.recipe_name), text


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's directory as it should be."""
    folder = tmp_path_factory.mktemp("built")
    build_character_model(folder, alphabet="0123456789+-= ", hidden=16, layers=1, heads=2, kv_heads=1, ffn=16)
    return folder


@pytest.fixture
def model(built: Path, mark: Path) -> Path:
    """A model's directory, with the planted module in it."""
    folder = mark.with_name("model")
    shutil.copytree(built, folder)
    shutil.copy(mark.parent / "importable" / f"{MODULE}.py", folder)
    return folder


def readers(folder: Path) -> list[Callable[[], object]]:
    messages = [{"role": "user", "content": "1+1="}]
    return [
        lambda: checked_model_directory(folder),
        lambda: hf_config(folder),
        lambda: load_policy(folder),
        lambda: load_processor(folder),
        lambda: load_tokenizer(folder).encode("1+1="),
        lambda: load_tokenizer(folder).render_chat(messages, add_generation_prompt=True),
    ]


def edit(file: Path, changes: dict[str, Any]) -> None:
    value = json.loads(file.read_text()) if file.is_file() else {}
    file.write_text(json.dumps(value | changes))


IN_FILES = [
    *(("config.json", what, changes) for what, changes in CONFIG.items()),
    *(("tokenizer_config.json", what, changes) for what, changes in TOKENIZER.items()),
    *(("generation_config.json", what, changes) for what, changes in GENERATION.items()),
]


@pytest.mark.parametrize(("name", "what", "changes"), IN_FILES, ids=[f"{what} in {name}" for name, what, _ in IN_FILES])
def test_h4_code_that_a_model_s_file_names_is_not_looked_at(
    mark: Path, model: Path, name: str, what: str, changes: dict[str, Any]
) -> None:
    edit(model / name, filled(changes, mark))
    ends = Counter[str]()
    for read in readers(model):
        ended(mark, what, read, ends)
    print(f"\n{what} in {name}: {dict(ends)}")


@pytest.mark.parametrize("what", TEMPLATES)
@pytest.mark.parametrize("place", ["tokenizer_config.json", "chat_template.jinja", "a list"])
def test_h4_a_chat_template_reaches_nothing_but_its_messages(mark: Path, model: Path, what: str, place: str) -> None:
    template = filled(TEMPLATES[what], mark)
    (model / "chat_template.jinja").unlink(missing_ok=True)
    if place == "chat_template.jinja":
        (model / place).write_text(template)
    else:
        named = [{"name": "default", "template": template}]
        edit(model / "tokenizer_config.json", {"chat_template": named if place == "a list" else template})
    ends = Counter[str]()
    tokenizer = load_tokenizer(model)
    assert tokenizer.has_chat_template
    found = ended(
        mark,
        what,
        lambda: tokenizer.render_chat([{"role": "user", "content": "1+1="}], add_generation_prompt=True),
        ends,
    )
    if not isinstance(found, RftError):
        assert "__builtins__" not in found
        assert "module 'os'" not in found


@pytest.mark.parametrize("what", ROWS)
def test_h4_a_row_that_names_code_is_data(mark: Path, what: str) -> None:
    value, file, ends = filled(ROWS[what], mark), mark.with_name("rows.jsonl"), Counter[str]()
    file.write_text(json.dumps({"input": "1+1=", "label": value}) + "\n")
    file.with_name("rows.py").write_text(PLANTED.format(mark=str(mark)))
    found = ended(mark, what, lambda: [dict(row.fields) for row in read_rows(file)], ends)
    assert found[0]["label"] == value
