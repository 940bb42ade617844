from typing import Any

import pytest

from headwater.config.overrides import apply_override, merge
from headwater.errors import UserError


def overridden(override: str, tree: dict[str, Any] | None = None) -> dict[str, Any]:
    tree = {} if tree is None else tree
    apply_override(tree, override)
    return tree


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3),
        ("-3", -3),
        ("007", 7),
        ("1e-5", 1e-5),
        ("1E5", 1e5),
        (".5", 0.5),
        ("2.", 2.0),
        ("-inf", float("-inf")),
        ("true", True),
        ("False", False),
        ("null", None),
        ("", ""),
        ("''", ""),
        ("'null'", "null"),
        ('"1e-5"', "1e-5"),
        ("'it''s'", "it's"),
        ('"a\\nb"', "a\nb"),
        ("builtin:tiny", "builtin:tiny"),
        ("12:30", "12:30"),
        ("Answer: be brief #1", "Answer: be brief #1"),
        ("yes", "yes"),
        ("a=b", "a=b"),
        ("*", "*"),
        ("@x", "@x"),
        ("[]", []),
        ("[a, 'b c', 1, 1e-3, null]", ["a", "b c", 1, 1e-3, None]),
        ("[[1,2],[3]]", [[1, 2], [3]]),
        ("{a: 1, b: {c: [x]}}", {"a": 1, "b": {"c": ["x"]}}),
        ("{}", {}),
        ("${a.b}", "${a.b}"),
        (" 3 ", 3),
    ],
)
def test_values_are_read_as_what_they_look_like(text, value):
    read = overridden(f"key={text}")["key"]
    assert read == value
    assert type(read) is type(value)


def test_a_dotted_key_reaches_into_mappings_and_makes_them():
    assert overridden("a.b.c=1", {"a": {"x": 2}}) == {"a": {"x": 2, "b": {"c": 1}}}
    assert overridden("a.b=1", {"a": None}) == {"a": {"b": 1}}


def test_a_plus_changes_nothing_else():
    assert overridden("+a.b=1") == overridden("++a.b=1") == overridden("a.b=1") == {"a": {"b": 1}}


def test_a_number_reaches_the_item_of_a_list():
    assert overridden("a.1.b=2", {"a": [{"b": 0}, {"b": 1, "c": 3}]}) == {"a": [{"b": 0}, {"b": 2, "c": 3}]}
    assert overridden("a.0=x", {"a": [1, 2]}) == {"a": ["x", 2]}


def test_a_mapping_merges_but_options_replace():
    assert overridden("a={b: 1}", {"a": {"c": 2}}) == {"a": {"c": 2, "b": 1}}
    assert overridden("a.options={b: 1}", {"a": {"options": {"c": 2}}}) == {"a": {"options": {"b": 1}}}
    assert overridden("a={options: {}}", {"a": {"options": {"c": 2}}}) == {"a": {"options": {}}}
    assert overridden("a.options.b=1", {"a": {"options": {"c": 2}}}) == {"a": {"options": {"c": 2, "b": 1}}}


def test_merge_leaves_its_arguments_alone():
    base, changes = {"a": {"b": 1}, "l": [1]}, {"a": {"c": 2}, "l": [2]}
    assert merge(base, changes) == {"a": {"b": 1, "c": 2}, "l": [2]}
    assert (base, changes) == ({"a": {"b": 1}, "l": [1]}, {"a": {"c": 2}, "l": [2]})


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("policy.lr", "write policy.lr=VALUE"),
        ("", "write key=VALUE"),
        ("=3", "names joined by dots"),
        ("a..b=3", "names joined by dots"),
        (".a=3", "names joined by dots"),
        ("text.x=3", "text is 'hello': it has no key x"),
        ("items.2.a=3", "items is a list of 2, numbered from 0: it has no item 2"),
        ("items.a=3", "it has no item a"),
        ("items.-1=3", "it has no item -1"),
        ("a=[1", "override 'a=[1'"),
        ("a='x", 'override "a=\'x"'),
        ("a='x' y", "override"),
    ],
)
def test_what_is_no_override_is_refused_in_one_line(override, message):
    with pytest.raises(UserError) as caught:
        overridden(override, {"text": "hello", "items": [1, 2]})
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
