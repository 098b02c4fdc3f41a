"""The configurations that ship with the repository, and the page that is generated from the schema."""

import importlib.util
from pathlib import Path

import pytest
from pydantic import ValidationError

from trireme.config import CommonConfig, Config
from trireme.config.checks import check
from trireme.config.inference import InferenceConfig
from trireme.config.keys import keys_of
from trireme.config.load import load
from trireme.config.orchestrator import OrchestratorConfig
from trireme.config.run import ClusterConfig
from trireme.config.section import Section
from trireme.config.sft import SftConfig

ROOT = Path(__file__).parents[3]
CONFIGS = sorted(path for path in (ROOT / "configs").glob("*.toml") if not path.stem.startswith("sft"))
COMMANDS: list[type[CommonConfig]] = [Config, SftConfig]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_each_config_is_read_without_a_warning(path: Path) -> None:
    assert check(load(["@", str(path)], {}).config, None) == []


def test_the_page_is_what_the_schema_says() -> None:
    """On failure: python scripts/make_config_docs.py"""
    spec = importlib.util.spec_from_file_location("make_config_docs", ROOT / "scripts" / "make_config_docs.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    page = script.render()
    assert script.TARGET.read_text() == page
    keys = [key for schema in COMMANDS for key in keys_of(schema).options.values()]
    assert [key.dotted for key in keys if f"`{key.dotted}`" not in page or not key.description.endswith(".")] == []


@pytest.mark.parametrize(
    ("section", "wrong"),
    [
        (OrchestratorConfig, {"max_steps_off_policy": -1}),
        (OrchestratorConfig, {"stale_policy": "bogus"}),
        (InferenceConfig, {"on_update": "abort"}),
    ],
)
def test_bounds_and_choices(section: type[Section], wrong: dict[str, object]) -> None:
    with pytest.raises(ValidationError, match=next(iter(wrong))):
        section.model_validate(wrong)


def test_ports_are_a_range_that_a_user_may_listen_at() -> None:
    for ports in ("20000", "a-b", "20999-20000", "80-90", "65000-66000", ""):
        with pytest.raises(ValidationError, match="such as 20000-20999"):
            ClusterConfig(ports=ports)
    assert ClusterConfig(ports="20000-20001").port_range == range(20000, 20002)
    assert list(ClusterConfig().port_range) == []
