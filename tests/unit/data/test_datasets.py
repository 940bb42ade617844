import json

import pytest

from headwater.config.schema import DatasetConfig
from headwater.data.datasets import load_problems
from headwater.errors import UserError


def gym(**changes):
    return DatasetConfig(**{"dataset": "reasoning_gym:chain_sum", "size": 5, "seed": 1, **changes})


def jsonl(tmp_path, *lines, **options):
    path = tmp_path / "data.jsonl"
    path.write_bytes(b"\n".join(line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines))
    return DatasetConfig(dataset=str(path), **options)


def refusal(config):
    with pytest.raises(UserError) as caught:
        load_problems(config)
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)
    return str(caught.value)


def user(text):
    return {"role": "user", "content": text}


def test_reasoning_gym_gives_question_answer_and_its_own_scoring():
    source = load_problems(gym(options={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}))
    assert len(source) == 5
    problem = source[3]
    assert problem.index == 3
    *_, expression, _ = problem.question.replace("problem:", "|").replace("=", "|").split("|")
    assert eval(expression) == int(problem.answer)
    score = problem.metadata["score_answer"]
    assert score(problem.answer, problem.metadata["entry"]) == 1.0
    assert score("no", problem.metadata["entry"]) == 0.0


def test_reasoning_gym_problems_depend_on_seed_and_index_alone():
    again = load_problems(gym())
    source = load_problems(gym())
    assert again[4].question == source[4].question
    assert [p.question for p in load_problems(gym(seed=77))] != [p.question for p in source]


def test_letters_are_endless_prompts_without_an_answer():
    source = load_problems(DatasetConfig(dataset="builtin:letters", size=20, seed=7))
    assert source[17].messages == ({"role": "user", "content": "Write lowercase letters. (7-17)"},)
    assert source[17].answer is None
    assert len({problem.question for problem in source}) == 20


def test_jsonl_rows_are_questions_or_conversations(tmp_path):
    talk = [{"role": "system", "content": "s"}, {**user("q"), "name": "ann"}]
    rows = [{"prompt": "p", "answer": 7, "level": 2}, {"prompt": talk, "answer": "a"}, {"prompt": "x", "answer": None}]
    source = load_problems(jsonl(tmp_path, rows[0], b"", rows[1], rows[2]))
    assert [problem.index for problem in source] == [0, 1, 2]
    assert (source[0].messages, source[0].answer, source[0].metadata) == ((user("p"),), "7", {"level": 2})
    assert source[1].messages == ({"role": "system", "content": "s"}, user("q"))
    assert source[2].answer is None


def test_columns_and_size_can_be_chosen(tmp_path):
    config = jsonl(tmp_path, {"q": "1"}, {"q": "2"}, b"broken", prompt_key="q", answer_key=None, size=2)
    assert [problem.question for problem in load_problems(config)] == ["1", "2"]


def test_a_byte_order_mark_and_other_scripts_are_read(tmp_path):
    assert load_problems(jsonl(tmp_path, b'\xef\xbb\xbf{"prompt": "\xe6\x9d\xb1", "answer": ""}'))[0].question == "東"


def test_the_system_prompt_goes_before_conversations_that_have_none(tmp_path):
    talk = [{"role": "system", "content": "own"}, user("q")]
    source = load_problems(jsonl(tmp_path, {"prompt": "p"}, {"prompt": talk}, answer_key=None), system_prompt="ours")
    assert [problem.messages[0]["content"] for problem in source] == ["ours", "own"]
    for config in (gym(), DatasetConfig(dataset="builtin:letters", size=1)):
        assert load_problems(config, system_prompt="ours")[0].messages[0] == {"role": "system", "content": "ours"}


@pytest.fixture
def table():
    import datasets

    return datasets.Dataset.from_dict({"prompt": ["a", "b", "c"], "answer": ["1", None, "3"], "more": [1, 2, 3]})


def test_hugging_face_folders_are_read(tmp_path, table):
    table.save_to_disk(tmp_path / "one")
    source = load_problems(DatasetConfig(dataset=str(tmp_path / "one"), size=2))
    assert [(p.question, p.answer, p.metadata) for p in source] == [("a", "1", {"more": 1}), ("b", None, {"more": 2})]


def test_hugging_face_conversations_are_read(tmp_path):
    import datasets

    datasets.Dataset.from_dict({"prompt": [[user("q")]]}).save_to_disk(tmp_path / "chat")
    assert load_problems(DatasetConfig(dataset=str(tmp_path / "chat"), answer_key=None))[0].messages == (user("q"),)


def test_hugging_face_splits_are_chosen_by_name(tmp_path, table):
    import datasets

    datasets.DatasetDict(train=table, test=table.select([2])).save_to_disk(str(tmp_path / "d"))
    assert load_problems(DatasetConfig(dataset=str(tmp_path / "d"), split="test"))[0].question == "c"
    assert "has splits: set split to one of train, test" in refusal(DatasetConfig(dataset=str(tmp_path / "d")))
    message = refusal(DatasetConfig(dataset=str(tmp_path / "d"), split="dev"))
    assert "has no split 'dev': it has train, test" in message
    (tmp_path / "d" / "dataset_dict.json").write_text("{}")
    assert "dataset_dict.json does not list its splits" in refusal(
        DatasetConfig(dataset=str(tmp_path / "d"), split="test")
    )


def test_an_empty_split_does_not_keep_the_others_from_being_read(tmp_path, table):
    import datasets

    datasets.DatasetDict(train=table, test=table.select([])).save_to_disk(str(tmp_path / "d"))
    assert len(load_problems(DatasetConfig(dataset=str(tmp_path / "d"), split="train"))) == 3
    assert "is empty: it has no rows" in refusal(DatasetConfig(dataset=str(tmp_path / "d"), split="test"))


def test_hugging_face_folders_that_do_not_fit_are_refused(tmp_path, table):
    table.save_to_disk(tmp_path / "one")
    path = str(tmp_path / "one")
    assert "is a single split: remove split=train" in refusal(DatasetConfig(dataset=path, split="train"))
    message = refusal(DatasetConfig(dataset=path, prompt_key="question"))
    assert "has no column 'question': set prompt_key to one of prompt, answer, more" in message
    table.select([]).save_to_disk(tmp_path / "none")
    assert "is empty" in refusal(DatasetConfig(dataset=str(tmp_path / "none")))
    (tmp_path / "one" / "state.json").write_text("{")
    assert f"cannot read dataset {path}" in refusal(DatasetConfig(dataset=path))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (gym(dataset="reasoning_gym:chain_sums"), "no reasoning_gym dataset 'chain_sums': did you mean chain_sum"),
        (gym(dataset="reasoning_gym:zzzzzzzz"), "no reasoning_gym dataset 'zzzzzzzz'"),
        (gym(size=None), "is generated and needs a size, such as size=1000"),
        (gym(options={"min_term": 2}), "reasoning_gym:chain_sum has no option 'min_term': did you mean 'min_terms'?"),
        (gym(options={"size": 2}), "options.size of reasoning_gym:chain_sum: set the dataset's own size instead"),
        (gym(options={"min_terms": 9, "max_terms": 2}), "max_terms must be >= min_terms"),
        (gym(options={"min_terms": "two"}), "refuses its options {'min_terms': 'two'}: TypeError"),
        (gym(split="train"), "split is for folders of Hugging Face datasets"),
        (gym(prompt_key="q"), "prompt_key and answer_key name columns of stored datasets"),
        (DatasetConfig(dataset="builtin:letters"), "builtin:letters is generated and needs a size"),
        (DatasetConfig(dataset="builtin:letters", size=1, options={"n": 1}), "has no option 'n': it takes none"),
        (
            DatasetConfig(dataset="builtin:words", size=1),
            "no built-in dataset 'builtin:words': there is 'builtin:letters'",
        ),
        (DatasetConfig(dataset="nowhere.jsonl"), "no such dataset: nowhere.jsonl (a dataset is reasoning_gym:<name>"),
        (DatasetConfig(dataset="gsm8k"), "no such dataset: gsm8k"),
    ],
)
def test_a_dataset_that_is_none_is_one_line(config, words):
    assert words in refusal(config)


def test_a_folder_or_file_of_another_kind_is_refused(tmp_path):
    assert "is not a folder saved by Hugging Face datasets" in refusal(DatasetConfig(dataset=str(tmp_path)))
    (tmp_path / "data.csv").write_text("prompt\nq\n")
    assert "cannot tell what" in refusal(DatasetConfig(dataset=str(tmp_path / "data.csv")))
    (tmp_path / "folder.jsonl").mkdir()
    assert "is not a folder saved by" in refusal(DatasetConfig(dataset=str(tmp_path / "folder.jsonl")))


GOOD = {"prompt": "p", "answer": "a"}


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (b'{"prompt": ', "line 2 is not JSON: Expecting value at column 12"),
        (b"[1]", "line 2 is not a JSON object but list"),
        (b'{"prompt": "\xff"}', "line 2 is not UTF-8: invalid start byte"),
        ({"question": "p", "answer": "a"}, "line 2 has no column 'prompt': set prompt_key to one of question, answer"),
        ({"prompt": "p"}, "line 2 has no column 'answer': set answer_key to one of prompt or null"),
        ({"prompt": "p", "answer": ["a"]}, "line 2: 'answer' must be text or a number, not list"),
        ({"prompt": "p", "answer": True}, "line 2: 'answer' must be text or a number, not bool"),
        ({"prompt": 3, "answer": "a"}, "line 2: 'prompt' must be text or a list of chat messages, not int"),
        ({"prompt": " ", "answer": "a"}, "line 2: 'prompt' is empty"),
        ({"prompt": [], "answer": "a"}, "line 2: 'prompt' is empty"),
        ({"prompt": ["hi"], "answer": "a"}, "line 2: each message of 'prompt' needs content (text) and role"),
        ({"prompt": [{"role": "bot", "content": "x"}], "answer": "a"}, "role (system, user, assistant)"),
        ({"prompt": [{"role": "user"}], "answer": "a"}, "needs content (text)"),
        (
            {"prompt": [user("q"), {"role": "assistant", "content": "x"}], "answer": "a"},
            "line 2: the last message of 'prompt' must be a user's turn, not assistant's",
        ),
    ],
)
def test_a_bad_line_is_named_with_its_number(tmp_path, bad, words):
    message = refusal(jsonl(tmp_path, GOOD, bad, GOOD))
    assert words in message
    assert str(tmp_path / "data.jsonl") in message


def test_a_file_without_rows_is_refused(tmp_path):
    assert "is empty: it has no rows" in refusal(jsonl(tmp_path, b"", b"  "))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"options": {"min_terms": 2}}, "options are for generated datasets"),
        ({"seed": 3}, "seed is for generated datasets"),
        ({"split": "train"}, "split is for folders"),
    ],
)
def test_a_setting_that_a_file_cannot_honour_is_refused(tmp_path, options, words):
    assert words in refusal(jsonl(tmp_path, GOOD, **options))


def test_rows_outside_the_dataset_do_not_exist():
    source = load_problems(gym())
    for index in (5, -1):
        with pytest.raises(IndexError):
            source[index]
    assert len(list(source)) == 5


def test_the_fingerprint_tells_other_problems_apart(tmp_path):
    same = [load_problems(gym()).fingerprint for _ in range(2)]
    assert same[0] == same[1]
    others = [gym(seed=2), gym(size=6), gym(options={"min_terms": 3}), gym(dataset="reasoning_gym:basic_arithmetic")]
    prints = [load_problems(config).fingerprint for config in others]
    prints.append(load_problems(gym(), system_prompt="s").fingerprint)
    assert len({same[0], *prints}) == 6


def test_the_fingerprint_of_a_file_is_of_its_rows_and_not_of_its_place(tmp_path):
    (tmp_path / "b").mkdir()
    first, moved = (load_problems(jsonl(folder, GOOD)).fingerprint for folder in (tmp_path, tmp_path / "b"))
    assert first == moved
    assert load_problems(jsonl(tmp_path, GOOD, GOOD)).fingerprint != first
    assert load_problems(jsonl(tmp_path, GOOD, answer_key=None)).fingerprint != first


def test_the_fingerprint_of_a_hugging_face_folder_is_the_same_each_time(tmp_path, table):
    table.save_to_disk(tmp_path / "one")
    table.select([1, 2]).save_to_disk(tmp_path / "two")
    one, again, two = (
        load_problems(DatasetConfig(dataset=str(tmp_path / name))).fingerprint for name in ("one", "one", "two")
    )
    assert one == again
    assert one != two
