"""Exactly one begin and one end per document, whatever the tokenizer does by itself; exact round trips."""

import json
import subprocess
import sys

import numpy as np
import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer, ByT5Tokenizer, PreTrainedTokenizerFast

from memtrain.command import BadInput
from memtrain.data import tokenizer as module
from memtrain.data.tokenizer import (
    BEGIN,
    END,
    PAD,
    document_ids,
    load_tokenizer,
    pad_token_id,
    tokenizer_fingerprint,
    tokenizer_size,
    train_tokenizer,
)

DOCUMENTS = ["alpha beta", "beta <|end_of_text|> gamma <s> </s>", "gamma"]
STRANGE = ["", " ", "  two  spaces , and . dots !", "a\r\nb\tc\n\n\n", "naïve Straße 漢字 \U0001f600\u200d \x00\x7f",
           "a\u2028b\ufeff", f"{BEGIN}x{END} {PAD}", "don't 's ' s", "e\u0301 \u00e9"]


def word_tokenizer(post: str | None, end: str | None = "</s>"):
    """Whole words; adds begin and end by itself as `post` says."""
    words = ["<unk>", "<s>", "</s>", "alpha", "beta", "gamma"]
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    if post:
        backend.post_processor = processors.TemplateProcessing(single=post, special_tokens=[("<s>", 1), ("</s>", 2)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token=end, unk_token="<unk>")


@pytest.mark.parametrize("post", [None, "<s> $A", "$A </s>", "<s> $A </s>"])
def test_f5_one_begin_and_one_end_whatever_is_added_automatically(post):
    ids = [document.tolist() for document in document_ids(word_tokenizer(post), DOCUMENTS)]
    assert ids[0] == [1, 3, 4, 2] and ids[2] == [1, 5, 2]
    for document in ids:
        assert (document[0], document[-1], document.count(1), document.count(2)) == (1, 2, 1, 1), document


def test_f5_a_tokenizer_without_an_end_token_is_refused(tmp_path):
    word_tokenizer(None, end=None).save_pretrained(tmp_path / "t")
    with pytest.raises(BadInput, match="has no end token"):
        load_tokenizer(str(tmp_path / "t"))


def test_f5_one_token_for_both_ends_stands_only_at_the_end():
    tokenizer = word_tokenizer("<s> $A </s>")
    tokenizer.bos_token = "</s>"
    assert next(document_ids(tokenizer, ["alpha"])).tolist() == [3, 2]
    assert pad_token_id(tokenizer) == 2, "the end token pads where there is no pad token"


def test_text_that_becomes_an_end_token_all_the_same_is_refused():
    tokenizer = word_tokenizer(None)
    tokenizer.backend_tokenizer.normalizer = normalizers.Replace("alpha", "</s>")
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    with pytest.raises(BadInput, match=r"turns text .* into its begin or end token"):
        list(document_ids(tokenizer, ["beta alpha"]))


def test_names_of_special_tokens_in_a_text_are_text(tokenizer):
    for text in (f"x {END} y", BEGIN + END + PAD, END):
        ids = next(document_ids(tokenizer, [text])).tolist()
        assert ids[0] == 0 and ids[-1] == 1 and not {0, 1, 2} & set(ids[1:-1]), ids
        assert tokenizer.decode(ids[1:-1]) == text
    assert tokenizer(END)["input_ids"] == [0, 1], "a prompt may still hold special tokens"


@pytest.mark.parametrize("text", STRANGE)
def test_round_trip_is_exact(tokenizer, text):
    ids = next(document_ids(tokenizer, [text])).tolist()
    assert tokenizer.decode(ids[1:-1]) == text
    if BEGIN not in text:
        assert tokenizer(text)["input_ids"] == ids[:-1], "a prompt starts as a training document does"


def test_trained_tokenizer_opens_offline_in_a_fresh_process(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path / "t")
    (tmp_path / "t" / "config.json").write_text('{"model_type": "llama"}')  # as in an exported folder
    code = ("import sys; from transformers import AutoTokenizer; t = AutoTokenizer.from_pretrained(sys.argv[1]);"
            "print(t('  a  b .')['input_ids'], t.decode(t('  a  b .')['input_ids'], skip_special_tokens=True) + '|',"
            " t.bos_token_id, t.eos_token_id, t.pad_token_id)")
    run = subprocess.run([sys.executable, "-c", code, str(tmp_path / "t")], capture_output=True, text=True, check=True,
                         env={"HF_HUB_OFFLINE": "1", "PATH": ""})
    assert run.stdout.strip() == f"{tokenizer('  a  b .')['input_ids']}   a  b .| 0 1 2"


def test_training_is_deterministic_and_keeps_its_size(tokenizer):
    texts = [f"word{i} and some more text\n" for i in range(50)]
    assert tokenizer_fingerprint(train_tokenizer(iter(texts), 300)) == tokenizer_fingerprint(tokenizer)
    assert tokenizer_size(tokenizer) == len(tokenizer) == 300
    assert tokenizer_fingerprint(train_tokenizer(texts, 299)) != tokenizer_fingerprint(tokenizer)
    text = "def f(x):\n    return x\n\n\n" * 9 + "end"
    in_pieces = train_tokenizer(module._pieces(text, 7), 280)
    assert tokenizer_fingerprint(in_pieces) == tokenizer_fingerprint(train_tokenizer([text], 280))
    assert len(train_tokenizer(["a"], 5000)) == 259, "no more tokens than the text gives"


def test_vocabulary_sizes():
    assert len(train_tokenizer(["abc abc"], 259)) == 259
    with pytest.raises(BadInput, match=r"vocab_size=258: .* at least 259"):
        train_tokenizer(["abc"], 258)


@pytest.mark.parametrize("spec", ["./no/such", "/no/such", "a/b/c", "empty"])
def test_a_tokenizer_that_cannot_be_loaded_is_one_line(tmp_path, monkeypatch, spec):
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadInput) as caught:
        load_tokenizer(spec)
    assert spec in str(caught.value) and "\n" not in str(caught.value)


def test_a_hub_failure_is_one_line(monkeypatch):
    def fail(*args, **options):
        raise OSError("We couldn't connect\nCheck your connection")

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", fail)
    with pytest.raises(BadInput, match=r"owner/name: cannot be loaded \(We couldn't connect Check your connection\)"):
        load_tokenizer("owner/name")


def test_ids_do_not_depend_on_batches(tokenizer):
    texts = [f"text number {i}\n" * (i % 7 + 1) for i in range(30)]
    wanted = [np.array([0, *tokenizer.backend_tokenizer.encode(t, add_special_tokens=False).ids, 1]) for t in texts]
    for batch_characters in (1, 50, 10_000):
        found = list(document_ids(tokenizer, iter(texts), batch_characters))
        assert len(found) == len(wanted) and all(map(np.array_equal, found, wanted)), batch_characters


def test_long_texts_are_tokenised_in_pieces_with_the_ids_of_the_whole():
    block = "def f{}(x):\n    return x\n\n\nclass A:\n\t'''d'''\n\ny = 1\r\n  \nz\n"
    text = "".join(block.format(i) for i in range(200)) + "end"
    tokenizer = train_tokenizer([text], 400)  # knows this text's runs of white space
    wanted = [0, *tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids, 1]
    for piece_characters in (1, 7, 14, 100):
        pieces = module._pieces(text, piece_characters)
        assert len(pieces) > 50 and "".join(pieces) == text
        assert next(document_ids(tokenizer, [text], piece_characters=piece_characters)).tolist() == wanted


def test_a_tokenizer_that_marks_the_start_of_its_text_gets_the_whole(tokenizer):
    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    marks = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=BEGIN, eos_token=END)
    assert module._pieces_are_exact(tokenizer) and not module._pieces_are_exact(marks)
    text = "word\n" * 100
    wanted = [0, *backend.encode(text, add_special_tokens=False).ids, 1]
    assert next(document_ids(marks, [text], piece_characters=10)).tolist() == wanted


def test_saved_truncation_is_not_obeyed(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path / "t")
    content = json.loads((tmp_path / "t" / "tokenizer.json").read_text())
    content["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    (tmp_path / "t" / "tokenizer.json").write_text(json.dumps(content))
    loaded = load_tokenizer(str(tmp_path / "t"))
    assert tokenizer_fingerprint(loaded) == tokenizer_fingerprint(tokenizer)
    text = "more text than four tokens"
    assert next(document_ids(loaded, [text])).tolist() == next(document_ids(tokenizer, [text])).tolist()


def test_a_tokenizer_written_in_python_works_too():
    slow = ByT5Tokenizer()
    ids = next(document_ids(slow, ["a</s>b"])).tolist()
    assert ids == [b + 3 for b in b"a</s>b"] + [slow.eos_token_id]
    assert tokenizer_fingerprint(slow) == tokenizer_fingerprint(ByT5Tokenizer())
