from __future__ import annotations

import pickle

import pytest
from narrowgate.precision.errors import NarrowgateError
from narrowgate.recipes import Path, Recipe, RecipeError, Rule, Spec, builtin_names, load_recipe
from narrowgate.recipes.document import MAX_BYTES, MAX_DEPTH


def test_the_contract_example_reads_into_objects(contract_text):
    recipe = Recipe.from_yaml(contract_text, file="gem.yaml")
    first, second, third = recipe.rules
    assert recipe.name == "gem-fp8"
    assert recipe.extends == "fp8-tensor"
    assert recipe.backend == "native"
    assert first.layers == ("interaction.**",)
    assert first.fprop == Path(input="fp8_e4m3/row", weight="fp8_e4m3/row")
    assert first.dgrad == Path(grad="fp8_e5m2/row+sr", weight="fp8_e4m3/row", accumulate="fast")
    assert first.wgrad is not None
    assert first.wgrad.grad == Spec.parse("fp8_e5m2+clip(p=99.99)")
    assert first.when == "always"
    assert second.where == "depth >= 0.75"
    assert second.wgrad == Path(grad="bf16", input="bf16")
    assert third.all == Spec.parse("bf16")
    assert recipe.shards is not None
    assert recipe.shards.all_gather == Spec.parse("fp8_e4m3/128x128")
    assert recipe.optimizer is not None
    assert recipe.optimizer.state == Spec.parse("bf16+sr")


def test_all_faults_of_a_file_come_at_once_in_order_each_in_its_place(faults):
    lines = faults(
        "recipe: a b\n"
        "default: bf16\n"
        "rules:\n"
        '  - layers: "inter..x"\n'
        "    where: in_feature >= 1024\n"
        "    fprop: fp8_e4m4/row\n"
        "    dgrad: {grad: fp8_e5m2/row+ssr, weigth: fp8_e4m3, accumulate: fst}\n"
        "    wgrad:\n"
        "    when: 3\n"
        "  - layers: []\n"
        "    fprop: 8\n"
        "    fprop: 9\n"
        "  - where: 'depth > \"x\"'\n"
        "    wgrad: [a]\n"
        "  - foo\n"
        '  - layers: "**"\n'
        "shards: yes\n"
        "activations: {save: fp9}\n"
        "backend: nativ\n"
    )
    places = [line.partition(": ")[0] for line in lines]
    assert places == [
        "r.yaml:1:9", "r.yaml:2:1", "r.yaml:4:20", "r.yaml:5:12", "r.yaml:6:12", "r.yaml:7:32", "r.yaml:7:37",
        "r.yaml:7:67", "r.yaml:8:5", "r.yaml:9:11", "r.yaml:10:13", "r.yaml:11:12", "r.yaml:12:5", "r.yaml:13:5",
        "r.yaml:13:21", "r.yaml:14:12", "r.yaml:15:5", "r.yaml:17:9", "r.yaml:18:21", "r.yaml:19:10",
    ]  # fmt: skip
    text = "\n".join(lines)
    for expected in (
        "default: unknown field 'default'; did you mean 'defaults'?",
        "rules[0].where: unknown attribute 'in_feature'; did you mean 'in_features'?",
        "rules[0].fprop: unknown format 'fp8_e4m4'; did you mean 'fp8_e4m3'?",
        "rules[0].dgrad.grad: unknown modifier 'ssr'; did you mean 'sr'?",
        "rules[0].dgrad.weigth: unknown field 'weigth'; did you mean 'weight'?",
        "rules[0].dgrad.accumulate: found 'fst', expected fast or accurate; did you mean 'fast'?",
        "rules[0].wgrad: found no value",
        "rules[0].when: found 3, expected always or profitable",
        "rules[1].fprop: found 8, expected a format expression or a mapping of input, weight, accumulate",
        "found key 'fprop' twice, first on line 11",
        "rules[2].layers: found no field 'layers'",
        "rules[2].wgrad: found a list ['a'], expected a format expression",
        "shards: found 'yes', expected a mapping",
        "backend: found 'nativ', expected native, torchao or transformer_engine; did you mean 'native'?",
    ):
        assert expected in text


def test_a_rule_that_sets_nothing_is_an_error(faults):
    assert "r.yaml:3:5: rules[0]: found a rule that sets nothing" in faults('recipe: x\nrules:\n  - layers: "**"\n')[0]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "found an empty file"),
        ("# only a comment\n", "found an empty file"),
        ("- a\n", "1:1: found a list ['a'], expected a mapping"),
        ("3\n", "1:1: found 3, expected a mapping"),
        ("recipe: x\n\trules: []\n", "2:1: not YAML: found character '\\t'"),
        ("recipe: x\n---\nrecipe: y\n", "2:1: found a second document"),
        ("recipe: !!python/object:os.system x\n", "1:9: found tag"),
        ('recipe: "\\U00110000"\n', "not YAML: "),
        ('recipe: "\\ud800"\n', "1:9: found half of a surrogate pair"),
        ("recipe: [" + "[" * 200 + "]" * 200 + "]\n", f"nested deeper than {MAX_DEPTH} levels"),
        ("a: &a [*a]\n", "1:8: found alias '*a', expected one whose anchor is complete before it"),
        ("a: &a [x, x]\n" + "".join(f"b{i}: &b{i} [*{'a' if i == 0 else f'b{i - 1}'}, *a]\n" for i in range(5000)),
         "aliases expand to more than"),
        ("recipe: " + "9" * 5000, "1:9: recipe: found "),
        ("recipe: 12\n", "1:9: recipe: found 12, expected a text"),
        ("recipe: x\nrules: {a: b}\n", "2:8: rules: found a mapping {'a': 'b'}, expected a list"),
        ("[a, b]: c\n", "1:1: found a key that is not text"),
        ("recipe: x\nrules:\n", "2:1: rules: found no value"),
        ("recipe: x\nextends: ''\n", "2:10: extends: found '', expected a text that is not empty"),
    ],
)  # fmt: skip
def test_what_is_no_recipe_is_said_in_one_line_with_its_place(faults, text, expected):
    lines = faults(text)
    assert expected in lines[0]
    assert lines[0].startswith("r.yaml")


def test_an_alias_is_read_as_what_it_stands_for():
    recipe = Recipe.from_yaml("recipe: x\nrules:\n- {layers: &l 'a.*', all: bf16}\n- {layers: *l, all: fp8_e4m3}\n")
    assert [rule.layers for rule in recipe.rules] == [("a.*",), ("a.*",)]


def test_yaml_words_that_look_like_booleans_stay_text():
    assert Recipe.from_yaml("recipe: on\ndescription: no\n").description == "no"


def test_offsets_count_characters_inside_quotes_and_point_at_the_expression_of_a_block_text(faults):
    assert faults('recipe: x\nrules: [{layers: "ü", all: "fp8_e4m3+ü"}]\n')[0].startswith("r.yaml:2:38: rules[0].all")
    block = "recipe: x\nrules:\n- layers: a\n  all: bf16\n  where: >\n    depth >\n    > 1\n"
    assert faults(block)[0].startswith("r.yaml:5:10: rules[0].where")


def test_files_that_cannot_be_read_say_why(tmp_path):
    def fault(path) -> str:
        with pytest.raises(RecipeError) as caught:
            load_recipe(path)
        return str(caught.value)

    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"recipe: x\n\xff\xfe")
    utf16 = tmp_path / "utf16.yaml"
    utf16.write_bytes("recipe: x".encode("utf-16"))
    nul = tmp_path / "nul.yaml"
    nul.write_bytes(b"recipe: \0\n")
    large = tmp_path / "large.yaml"
    large.write_bytes(b"#" * (MAX_BYTES + 1))
    assert fault(binary) == f"{binary}:2: found byte 0xff, expected UTF-8 text"
    assert "expected UTF-8 text" in fault(utf16)
    assert "not YAML" in fault(nul)
    assert "found more than 256 KiB" in fault(large)
    assert fault(tmp_path) == f"{tmp_path}: found a directory, expected a recipe file"
    assert "no such file" in fault(tmp_path / "missing.yaml")
    assert "no such file" in fault(str(tmp_path / "missing.yaml"))


def test_a_byte_order_mark_is_no_fault(tmp_path):
    path = tmp_path / "bom.yaml"
    path.write_bytes(b"\xef\xbb\xbfrecipe: x\n")
    assert load_recipe(path).name == "x"


@pytest.mark.parametrize("name", ["gem-fp9", "gem-fp8.yaml", "x" * 5000, "a\0b", "", "no such thing"])
def test_an_unknown_name_lists_the_built_ins(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RecipeError) as caught:
        load_recipe(name)
    text = str(caught.value)
    assert "\n" not in text
    assert all(builtin in text for builtin in builtin_names())
    assert ("did you mean 'gem-fp8'?" in text) == name.startswith("gem")


def test_a_built_in_name_wins_over_a_file_of_that_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bf16").write_text("recipe: other\n")
    assert load_recipe("bf16").name == "bf16"


def test_extends_puts_the_base_first_and_fills_what_is_unset(tmp_path):
    (tmp_path / "base.yaml").write_text(
        "recipe: base\ndefaults: fp8_e4m3\nbackend: torchao\noptimizer: {state: bf16}\n"
        "rules: [{layers: a, all: bf16}]\n"
    )
    (tmp_path / "own.yaml").write_text(
        "recipe: own\nextends: base.yaml\nbackend: native\nrules: [{layers: b, all: bf16}]\n"
    )
    own = load_recipe(tmp_path / "own.yaml")
    flat = own.flatten()
    assert [rule.layers[0] for rule in flat.rules] == ["a", "b"]
    assert str(flat.defaults) == str(Spec.parse("fp8_e4m3"))
    assert flat.backend == "native"
    assert flat.optimizer is not None
    assert flat.name == "own"
    assert flat.extends is None
    assert own.extends == "base.yaml"
    assert flat.rules[0].source is not None
    assert flat.rules[0].source.file.endswith("base.yaml")


def test_extends_of_a_built_in_works_from_text_files_and_objects(tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text("recipe: r\nextends: fp8-row\n")
    expected = load_recipe("fp8-row").rules
    assert load_recipe(path).flatten().rules == expected
    assert Recipe(name="r", extends="fp8-row").flatten().rules == expected
    assert Recipe.from_yaml("recipe: r\nextends: fp8-row\n").flatten().rules == expected


def test_extends_faults_name_the_line(tmp_path):
    def fault(text: str) -> str:
        path = tmp_path / "r.yaml"
        path.write_text(text)
        with pytest.raises(RecipeError) as caught:
            load_recipe(path)
        return str(caught.value)

    assert "r.yaml:2:10: extends: found 'fp8-rwo', expected a built-in recipe or a file" in fault(
        "recipe: x\nextends: fp8-rwo\n"
    )
    assert "did you mean 'fp8-row'?" in fault("recipe: x\nextends: fp8-rwo\n")
    assert "r.yaml:2:10: extends: found a circle" in fault("recipe: x\nextends: r.yaml\n")
    (tmp_path / "other.yaml").write_text("recipe: o\nextends: r.yaml\n")
    assert "other.yaml:2:10: extends: found a circle" in fault("recipe: x\nextends: other.yaml\n")
    (tmp_path / "other.yaml").write_text("recipe: o\nrules: [{layers: a, all: fp7}]\n")
    assert "other.yaml:2:26: rules[0].all: unknown format 'fp7'" in fault("recipe: x\nextends: other.yaml\n")
    assert "extends: found" in fault("recipe: x\nextends: .\n") or "directory" in fault("recipe: x\nextends: .\n")


def test_objects_refuse_what_files_refuse():
    with pytest.raises(NarrowgateError, match="operand 'weight', expected grad and input"):
        Rule(layers="a", wgrad=Path(weight="bf16"))
    with pytest.raises(NarrowgateError, match="unknown format 'fp9'"):
        Rule(layers="a", all="fp9")
    with pytest.raises(NarrowgateError, match="sets nothing"):
        Rule(layers="a")
    with pytest.raises(NarrowgateError, match="empty level"):
        Rule(layers=["a", "b..c"], all="bf16")
    with pytest.raises(NarrowgateError, match="layers: found 3, expected a text"):
        Rule(layers=3, all="bf16")  # type: ignore[arg-type]
    with pytest.raises(NarrowgateError, match="unknown attribute"):
        Rule(layers="a", where="width > 1", all="bf16")
    with pytest.raises(NarrowgateError, match="found 'sometimes', expected always or profitable"):
        Rule(layers="a", when="sometimes")
    with pytest.raises(NarrowgateError, match="recipe name"):
        Recipe(name="../escape")
    with pytest.raises(NarrowgateError, match="expected a built-in name, a path or a Recipe"):
        load_recipe(3)  # type: ignore[arg-type]


def test_errors_and_recipes_survive_pickling(contract_text):
    recipe = Recipe.from_yaml(contract_text)
    assert pickle.loads(pickle.dumps(recipe)) == recipe
    with pytest.raises(RecipeError) as caught:
        Recipe.from_yaml("recipe: a b\n")
    copy = pickle.loads(pickle.dumps(caught.value))
    assert copy.diagnostics == caught.value.diagnostics
    assert str(copy) == str(caught.value)


def test_diagnostics_become_github_annotations():
    with pytest.raises(RecipeError) as caught:
        Recipe.from_yaml("recipe: x\nrules: [{layers: a, all: fp7}]\n", file="dir/a,b.yaml")
    assert (
        caught.value.diagnostics[0]
        .github()
        .startswith("::error file=dir/a%2Cb.yaml,line=2,col=26::rules[0].all: unknown format 'fp7'")
    )
