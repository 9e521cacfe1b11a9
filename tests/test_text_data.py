"""What is read, and what is held out: nothing is in both parts, and the cut is the same everywhere."""

import os
import sysconfig
from pathlib import Path

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from whorl.errors import InputError
from whorl.text.data import HELD_OUT, Corpus, Source, place
from whorl.text.data import read as read_source
from whorl.text.streams import Streams
from whorl.text.vocabulary import END, UNKNOWN, Vocabulary, words


def read(path: Path | None, kind: str = "bytes", **others: Path | int) -> Corpus:
    return read_source(Source(path, kind, **others))


def write(folder: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def as_bytes(tokens: torch.Tensor) -> bytes:
    return bytes(tokens.tolist())


def numbered(count: int) -> dict[str, bytes]:
    return {f"part{i % 3}/file{i}.txt": f"<{i}>".encode() * 9 for i in range(count)}


def test_whole_files_are_held_out_and_every_file_is_in_one_part(tmp_path: Path) -> None:
    files = numbered(150)
    corpus = read(write(tmp_path, files))
    train, held_out = as_bytes(corpus.train), as_bytes(corpus.held_out)
    inside = {name for name, content in files.items() if content in held_out}
    assert inside == {f"part{i % 3}/file{i}.txt" for i in (66, 72, 91, 126)}  # by SHA-256: the same on every machine
    assert all((content in train) != (name in inside) for name, content in files.items())
    assert len(train) + len(held_out) == sum(map(len, files.values()))
    assert (corpus.files, corpus.files_held_out) == (150, 4)


def test_new_files_do_not_move_the_others(tmp_path: Path) -> None:
    few = as_bytes(read(write(tmp_path, numbered(150))).held_out)
    many = as_bytes(read(write(tmp_path, numbered(200))).held_out)
    assert all((content in few) == (content in many) for content in numbered(150).values())
    assert len(many) > len(few)


def test_places_do_not_depend_on_the_machine() -> None:
    assert place("json/decoder.py") == 0.2311742724437984
    places = [place(f"{i}.py") for i in range(4000)]
    assert abs(sum(where < HELD_OUT for where in places) / 4000 - HELD_OUT) < 0.015


def test_a_folder_without_low_places_holds_out_its_lowest(tmp_path: Path) -> None:
    names = [name for name in (f"{i}.txt" for i in range(100)) if place(name) > 0.3][:25]
    corpus = read(write(tmp_path, {name: name.encode() for name in names}))
    assert as_bytes(corpus.held_out) == min(names, key=place).encode()


def test_the_end_of_a_file_is_held_out(tmp_path: Path) -> None:
    content = bytes(range(200))
    corpus = read(write(tmp_path, {"a": content}) / "a")
    assert (as_bytes(corpus.train), as_bytes(corpus.held_out)) == (content[:190], content[190:])


def test_the_end_of_each_file_of_a_small_folder_is_held_out(tmp_path: Path) -> None:
    corpus = read(write(tmp_path, {"a": b"a" * 40, "b/c": b"c" * 60}))
    assert (as_bytes(corpus.train), as_bytes(corpus.held_out)) == (b"a" * 38 + b"c" * 57, b"aaccc")


def test_the_standard_library_is_cut_as_documented() -> None:
    corpus, root = read(None), Path(sysconfig.get_path("stdlib"))
    train, held_out = as_bytes(corpus.train), as_bytes(corpus.held_out)
    assert 0.01 < len(held_out) / (len(train) + len(held_out)) < 0.12
    for name in ("copyreg.py", "json/decoder.py", "secrets.py", "email/charset.py"):
        content = (root / name).read_bytes()
        assert (content in held_out) == (place(name) < HELD_OUT)
        assert (content in train) != (content in held_out)
    assert (root / "encodings/aliases.py").read_bytes() not in train + held_out
    assert corpus.unit == "character"


def test_what_is_no_text_is_left_out_of_a_folder_and_counted(tmp_path: Path) -> None:
    files = {"a": b"text" * 9, "b": b"\0binary", "c": b"\xff\xfe", ".hidden": b"no", ".git/d": b"no", "empty": b""}
    write(tmp_path, files)
    os.symlink("nowhere", tmp_path / "dangling")
    corpus = read(tmp_path)
    assert (corpus.files, corpus.skipped, len(corpus.train) + len(corpus.held_out)) == (2, 1, 38)
    corpus = read(tmp_path, "characters")
    assert (corpus.files, corpus.skipped, len(corpus.train) + len(corpus.held_out)) == (1, 2, 36)


def test_bytes_that_continue_characters_are_no_characters(tmp_path: Path) -> None:
    write(tmp_path, {"plain": b"plain text " * 99, "greek": "κείμενο ".encode() * 99})
    assert [read(tmp_path / name).unit for name in ("plain", "greek")] == ["character", "byte"]
    assert read(tmp_path / "greek", "characters").unit == "character"


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("missing", "bytes", "does not exist"),
        ("nothing", "bytes", "nothing is empty"),
        ("folder", "bytes", "no text among its 1 files"),
        ("folder/binary", "characters", "a zero byte at 1"),
        ("latin1", "characters", "not UTF-8 .at byte 3"),
        ("latin1", "words", "not UTF-8 .at byte 3"),
        ("good", "syllables", "bytes, characters, words"),
    ],
)
def test_bad_input_is_refused_with_the_reason(tmp_path: Path, name: str, kind: str, message: str) -> None:
    write(tmp_path, {"nothing": b"", "folder/binary": b"a\0", "latin1": b"caf\xe9", "good": b"good"})
    with pytest.raises(InputError, match=message):
        read(tmp_path / name, kind)


def test_more_text_than_fits_is_refused_before_it_is_read(tmp_path: Path) -> None:
    with open(tmp_path / "huge", "wb") as file:
        file.truncate(5 << 30)
    with pytest.raises(InputError, match=r"has 5\.0 GiB"):
        read(tmp_path / "huge")


@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1))
def test_characters_come_back(text: str) -> None:
    vocabulary = Vocabulary.of("characters", [text.encode()])
    tokens = vocabulary.encode(text.encode())
    assert vocabulary.decode(tokens) == text
    assert tokens.tolist() == [sorted(set(text)).index(character) for character in text]


@pytest.mark.parametrize("strange", ["a", "m", "\U0010ffff"])
def test_a_character_outside_the_vocabulary_is_named(strange: str) -> None:
    with pytest.raises(InputError, match="is not among the 3 characters") as caught:
        Vocabulary("characters", "blz").encode(f"zl{strange}b".encode())
    assert repr(strange) in str(caught.value)


@pytest.mark.parametrize("characters", ["ba", "aa"])
def test_a_vocabulary_is_ordered_and_holds_nothing_twice(characters: str) -> None:
    with pytest.raises(InputError, match="once, in order"):
        Vocabulary("characters", characters)


def test_words_are_numbered_by_their_frequency_in_the_text_to_train_on(tmp_path: Path) -> None:
    text = b"b a  c\nb\ta b\n\nc d\n"  # the Penn Treebank's way: a line's end is a word, white space none
    files = {"text": text, "valid": b"a z\n<unk> d", "test": b"q"}
    write(tmp_path, files)
    corpus = read(tmp_path / "text", "words", valid=tmp_path / "valid", test=tmp_path / "test")
    assert list(corpus.vocabulary.entries) == [END, "b", "a", "c", "d", UNKNOWN]
    assert [corpus.vocabulary.entries[number] for number in corpus.train] == [
        *("b", "a", "c", END, "b", "a", "b", END, END, "c", "d", END)
    ]
    assert [corpus.vocabulary.entries[number] for number in corpus.held_out] == ["a", UNKNOWN, END, UNKNOWN, "d"]
    assert corpus.test is not None
    assert corpus.test.tolist() == [corpus.vocabulary.unknown]
    assert (corpus.unit, corpus.unknown, corpus.files_held_out) == ("word", 0.4, None)


def test_a_vocabulary_of_words_keeps_the_most_frequent(tmp_path: Path) -> None:
    write(tmp_path, {"text": b"c c c a a b b d " * 30, "valid": b"a b"})
    corpus = read(tmp_path / "text", "words", valid=tmp_path / "valid", vocabulary=3)
    assert list(corpus.vocabulary.entries) == ["c", "a", UNKNOWN]
    assert corpus.train[:8].tolist() == [0, 0, 0, 1, 1, 2, 2, 2]
    assert corpus.held_out.tolist() == [1, 2]


@example(["a <eos>", "b<eos>"])  # the mark as a word of the text ends a line too
@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]))))
def test_words_are_those_of_split_and_come_back_by_line(lines: list[str]) -> None:
    text = "\n".join(lines)
    assert list(words(text)) == text.replace("\n", f" {END} ").split()
    vocabulary = Vocabulary("words", "\n".join(sorted({*words(text), UNKNOWN})))
    cut: list[list[str]] = [[]]
    for word in text.replace("\n", f" {END} ").split():
        cut += [[]] if word == END else []
        cut[-1] += [] if word == END else [word]
    plain = "\n".join(" ".join(line) for line in cut)
    assert vocabulary.decode(vocabulary.encode(text.encode())) == plain


def test_held_out_text_of_its_own_cuts_nothing(tmp_path: Path) -> None:
    write(tmp_path, {"a": b"abc" * 50, "b": b"xyz" * 30, "c": b"c" * 9})
    corpus = read(tmp_path / "a", valid=tmp_path / "b", test=tmp_path / "c")
    assert (as_bytes(corpus.train), as_bytes(corpus.held_out)) == (b"abc" * 50, b"xyz" * 30)
    assert corpus.test is not None
    assert as_bytes(corpus.test) == b"c" * 9
    assert read(tmp_path / "a", "characters", valid=tmp_path / "b").vocabulary.text == "abcxyz"


def test_the_digest_knows_every_token_and_no_path(tmp_path: Path) -> None:
    write(tmp_path, {"a": b"abcd" * 50, "b": b"abcd" * 50, "c": b"abcd" * 49 + b"abce", "d": b"bcde" * 50})
    digests = [read(tmp_path / name, "characters").digest for name in "abcd"]
    assert digests[0] == digests[1]
    assert len(set(digests)) == 3  # that of d differs in its letters alone
    assert read(tmp_path / "a", "characters", test=tmp_path / "b").digest not in digests


@pytest.mark.parametrize(
    ("kind", "vocabulary", "message"),
    [("bytes", 5, "tokens are bytes"), ("words", 1, "vocabulary is 1"), ("words", 2.5, "vocabulary is 2.5")],
)
def test_vocabularies_that_cannot_be_are_refused(kind: str, vocabulary: int, message: str) -> None:
    with pytest.raises(InputError, match=message):
        Source(None, kind, vocabulary=vocabulary)


@pytest.mark.parametrize("text", ["a\nb", "a\na\n<unk>", "a b\n<unk>", "a\n\n<unk>", ""])
def test_a_vocabulary_of_words_lists_each_once_and_has_a_word_for_the_rest(text: str) -> None:
    with pytest.raises(InputError, match="once, one a line, <unk> among them"):
        Vocabulary("words", text)


@pytest.mark.parametrize(
    ("vocabulary", "start"),
    [
        (Vocabulary("bytes"), "\n"),
        (Vocabulary("characters", "\n abc"), "\n"),
        (Vocabulary("characters", " abc"), " "),
        (Vocabulary("characters", "abc"), "a"),
        (Vocabulary("words", f"the\n{END}\n{UNKNOWN}"), "\n"),
        (Vocabulary("words", f"the\n{UNKNOWN}"), "the"),
    ],
)
def test_a_text_can_begin_with_what_the_vocabulary_has(vocabulary: Vocabulary, start: str) -> None:
    assert vocabulary.decode(vocabulary.start) == start


@given(st.integers(2, 300), st.integers(1, 12), st.integers(1, 40))
def test_windows_give_every_token_once_and_its_successor(count: int, batch: int, time: int) -> None:
    tokens = torch.arange(count, dtype=torch.int32)
    if count <= batch:
        with pytest.raises(InputError, match="do not make"):
            Streams(tokens, batch)
        return
    streams = Streams(tokens, batch)
    windows = [streams.window(start, time) for start in range(0, streams.columns, time)]
    inputs = torch.cat([window[0] for window in windows]).t().flatten()
    targets = torch.cat([window[1] for window in windows]).t().flatten()
    assert torch.equal(inputs, torch.arange(len(streams)))
    assert torch.equal(targets, inputs + 1)
    assert count - 1 - batch < len(streams) <= count - 1
