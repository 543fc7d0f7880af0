"""The recipes that the documents show, planned for the model that they name."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from narrowgate.gates.cli import main

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("document", ["README.md", "docs/recipes.md"])
def test_the_first_recipe_of_a_document_fits_the_model_that_it_is_planned_for(
    document: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    text = (ROOT / document).read_text(encoding="utf-8")
    (recipe, *_) = re.findall(r"```yaml\n(recipe: .*?)```", text, re.DOTALL)
    (arguments, *_) = re.findall(r"narrowgate (plan \w+\.yaml [-\w ]+)", text)
    monkeypatch.chdir(tmp_path)
    Path(arguments.split()[1]).write_text(recipe, encoding="utf-8")
    with pytest.raises(SystemExit) as ended:
        main(arguments.split())
    assert ended.value.code == 0
    assert re.search(r"interaction\S+ .*fp8_e5m2/row\+sr", capsys.readouterr().out)
