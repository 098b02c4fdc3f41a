"""A tokenizer of somebody else is opened without running code that lies beside it."""

import builtins
import json
from pathlib import Path

import pytest
from renderer_support import CONVERSATIONS, bpe
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from twenty_questions import _loaded

from trainer.model import load_source
from trireme.core.errors import BadInput
from trireme.core.tokenizer import encode_text, load_tokenizer
from trireme.renderers import make_renderer

SORT = Path(__file__).parents[3] / "assets" / "sort-base"


@pytest.fixture
def evil(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model whose files name code that lies beside them, and a user who would agree to anything."""
    directory = tmp_path / "model"
    directory.mkdir()
    for file in SORT.iterdir():
        (directory / file.name).write_bytes(file.read_bytes())
    code = f"open({str(tmp_path / 'canary')!r}, 'w')\nclass Evil: pass\n"
    (directory / "evil.py").write_text(code)
    monkeypatch.setattr(builtins, "input", lambda _: "y")
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    yield directory
    assert not (tmp_path / "canary").exists(), "code beside a model ran"


def edit(file: Path, **changes: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_a_class_beside_a_tokenizer_is_not_loaded(evil: Path) -> None:
    (evil / "tokenizer.json").rename(evil / "vocab.txt")
    changed = {"auto_map": {"AutoTokenizer": ["evil.Evil", None]}, "tokenizer_class": "Evil"}
    edit(evil / "tokenizer_config.json", **changed)
    with pytest.raises(BadInput, match=r"(?s)tokenizer = .*cannot open.*never runs"):
        load_tokenizer(str(evil))


def test_a_tokenizer_in_a_file_is_opened_without_the_class_that_it_names(evil: Path) -> None:
    edit(evil / "tokenizer_config.json", auto_map={"AutoTokenizer": ["evil.Evil", "evil.Evil"]})
    assert load_tokenizer(str(evil))("1")["input_ids"]


def test_a_class_beside_a_model_is_not_loaded(evil: Path) -> None:
    edit(evil / "config.json", auto_map={"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"})
    assert isinstance(load_source(str(evil)), type(AutoModelForCausalLM.from_pretrained(SORT)))
    edit(evil / "config.json", model_type="evil")
    with pytest.raises(ValueError, match="custom code"):
        load_source(str(evil))


def test_a_kernel_that_a_model_names_is_not_fetched(evil: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []
    monkeypatch.setattr(
        "transformers.integrations.hub_kernels.load_and_register_attn_kernel", lambda *a: calls.append(a)
    )
    for key in ("attn_implementation", "_attn_implementation"):
        edit(evil / "config.json", **{key: "evil/kernel"})
        load_source(str(evil))
        _loaded(str(evil))
    assert calls == []


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__.os.mkdir('canary') }}",
        "{{ lipsum.__globals__['os'].popen('touch canary').read() }}",
    ],
)
def test_a_chat_template_is_in_a_sandbox(evil: Path, template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from jinja2.exceptions import SecurityError, UndefinedError

    monkeypatch.chdir(evil.parent)
    tokenizer = load_tokenizer(str(evil))
    tokenizer.chat_template = template
    with pytest.raises((SecurityError, UndefinedError)):
        make_renderer("chat_template", tokenizer)


@pytest.mark.parametrize("state", ["as it was", "truncating", "padding", "splitting special tokens"])
def test_a_text_has_the_tokens_that_the_tokenizers_own_verb_gives(state: str) -> None:
    tokenizer = bpe()
    texts = [message["content"] for messages, _ in CONVERSATIONS.values() for message in messages]
    text = "<|im_end|>\n<|im_start|>user\n".join(["", *texts, ""])
    tokens = tokenizer.encode(text, add_special_tokens=False)
    if state == "truncating":
        tokenizer(text, truncation=True, max_length=2)
    if state == "padding":
        tokenizer.backend_tokenizer.enable_padding(length=2000)
    if state == "splitting special tokens":
        tokenizer.encode(text, split_special_tokens=True)
    assert encode_text(tokenizer, text) == tokens
    assert len(tokens) > 100


def test_a_tokenizer_that_encodes_in_its_own_way_does_so() -> None:
    class Own(PreTrainedTokenizerFast):
        def encode(self, text: str, **options: object) -> list[int]:
            return [7]

    assert encode_text(Own(tokenizer_object=bpe().backend_tokenizer), "a") == [7]
