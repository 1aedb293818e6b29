"""Reading files: nothing is dropped unseen, and every refusal names its place and its remedy."""

import gzip
import json
import logging
import lzma
import sys
import types
from pathlib import Path

import pytest
import zstandard

from loopwise.data.documents import Document
from loopwise.data.files import ReadOptions, ReadReport, read_documents, split_held_out
from loopwise.errors import ConfigError, DataError, MissingExtraError

PACKERS = {"": bytes, ".gz": gzip.compress, ".xz": lzma.compress, ".zst": zstandard.compress}
PACKED = pytest.mark.parametrize("suffix", PACKERS)
FIVE_LINES = b"one\ntwo\nit\x92s three\nfour\nfive\n"


def read(*sources: str | Path, **options: object) -> tuple[list[str], ReadReport]:
    report = ReadReport()
    chosen = ReadOptions(**options)  # type: ignore[arg-type]
    return [document.text for document in read_documents(sources, chosen, report)], report


def refusal(*sources: str | Path, **options: object) -> str:
    with pytest.raises(DataError) as caught:
        read(*sources, **options)
    return str(caught.value)


def written(path: Path, content: bytes | str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def jsonl(path: Path, *records: object) -> Path:
    return written(path, "\n".join(map(json.dumps, records)) + "\n")


@PACKED
def test_text_is_read_whatever_it_is_packed_in(tmp_path: Path, suffix: str) -> None:
    content = "\ufeffOne.\nTwo.\n<|endoftext|>\nThree é.\n".encode()
    path = written(tmp_path / f"a.txt{suffix}", PACKERS[suffix](content))
    texts, report = read(path)
    assert texts == ["One.\nTwo.", "Three é."]
    assert (report.files, report.documents, report.characters, report.bytes) == (1, 2, 17, 18)


@PACKED
def test_records_are_read_whatever_they_are_packed_in(tmp_path: Path, suffix: str) -> None:
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    lines = jsonl(tmp_path / "a.jsonl", {"text": "good"}, {"text": None}).read_bytes()
    path = written(tmp_path / f"b.jsonl{suffix}", PACKERS[suffix](lines))
    assert read(path)[0] == ["good"]
    plain = tmp_path / "a.parquet"
    parquet.write_table(arrow.table({"body": ["good", None, "  "], "n": [1, 2, 3]}), plain)
    path = written(tmp_path / f"b.parquet{suffix}", PACKERS[suffix](plain.read_bytes()))
    texts, report = read(path, text_field="body")
    assert texts == ["good"] and report.skipped == {"null text": 1, "blank": 1}
    remedy = "choose another with --set data.read.text_field=NAME"
    assert f"no column 'text'; {remedy}, one of: body, n" in refusal(path)
    assert "column 'n' holds int64, not text" in refusal(path, text_field="n")
    broken = written(tmp_path / f"c.parquet{suffix}", PACKERS[suffix](plain.read_bytes()[:-9]))
    assert f"{broken}: not a readable Parquet file" in refusal(broken)


def test_u70_bytes_that_are_not_utf8_under_the_three_policies(tmp_path: Path) -> None:
    path = written(tmp_path / "a.txt", FIVE_LINES)
    message = refusal(path, split="line")
    assert f"{path}: line 3: byte 0x92 at position 3" in message
    assert "iconv" in message and "--set data.read.encoding_errors=replace (or skip)" in message
    texts, report = read(path, split="line", encoding_errors="replace")
    assert texts == ["one", "two", "it\ufffds three", "four", "five"] and report.replaced == 1
    texts, report = read(path, split="line", encoding_errors="skip")
    assert texts == ["one", "two", "four", "five"] and report.skipped == {"bad utf-8": 1}


def test_a_skipped_line_takes_its_document_along_where_a_document_has_lines(tmp_path: Path) -> None:
    path = written(tmp_path / "a.txt", FIVE_LINES + b"<|endoftext|>\nsix\n")
    texts, report = read(path, encoding_errors="skip")
    assert texts == ["six"] and report.skipped == {"bad utf-8": 1}
    path = written(tmp_path / "b.txt", FIVE_LINES)
    assert "not one document" in refusal(path, encoding_errors="skip")
    texts, report = read(path, encoding_errors="skip", max_document_chars=3)
    assert "four" not in texts and report.skipped["bad utf-8"] == 1


def test_u71_json_lines_that_hold_no_text_are_counted(tmp_path: Path) -> None:
    rows = [{"text": ""}, {"text": " \n"}, {"text": None}, {"body": "x"}, {"text": "good"}]
    path = jsonl(tmp_path / "a.jsonl", *rows)
    texts, report = read(path)
    assert texts == ["good"]
    assert report.skipped == {"blank": 2, "null text": 1, "missing field 'text'": 1}
    assert "4 documents" not in report.summary() and "1 documents" in report.summary()
    message = refusal(jsonl(tmp_path / "b.jsonl", {"body": "x"}))
    assert "not one document" in message and "--set data.read.text_field=text" in message


def test_broken_json_names_file_and_line(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", b'{"text": "a"}\r\n\r\n{"text": \n')
    assert f"{path}: line 3 is not JSON" in refusal(path)
    path = written(tmp_path / "b.jsonl", b'["a"]\n')
    assert f"{path}: line 1 holds list, not an object" in refusal(path)
    path = jsonl(tmp_path / "c.jsonl", {"text": 3})
    assert "line 1: field 'text' holds int, not text" in refusal(path)


def test_half_a_surrogate_pair_in_json_is_a_bad_byte(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", b'{"text": "a\\ud83d"}\n{"text": "good"}\n')
    assert f"{path}: line 1: byte 0xed" in refusal(path)
    assert read(path, encoding_errors="skip")[0] == ["good"]
    assert read(path, encoding_errors="replace")[0][0].startswith("a\ufffd")


def test_u72_lines_end_at_lf_and_crlf_only(tmp_path: Path) -> None:
    lines = ["a\u2028b\u2029c", "d\x0be\x0cf\x85g", "h\ri"]
    unix = written(tmp_path / "unix.txt", "\n".join(lines) + "\n")
    dos = written(tmp_path / "dos.txt", "\r\n".join(lines) + "\r\n")
    assert read(unix, split="line")[0] == read(dos, split="line")[0] == lines
    assert read(unix)[0] == read(dos)[0] == ["\n".join(lines)]
    path = written(tmp_path / "a.jsonl", '{"text": "x\u2028y"}\n')
    assert read(path)[0] == ["x\u2028y"]


def test_the_ways_to_split_text(tmp_path: Path) -> None:
    path = written(tmp_path / "a.txt", "a\nb\n\n\n---\nc\n\nd")
    assert read(path, split="file")[0] == ["a\nb\n\n\n---\nc\n\nd"] == read(path)[0]
    assert read(path, split="blank-line")[0] == ["a\nb", "---\nc", "d"]
    assert read(path, split="separator", separator="---")[0] == ["a\nb\n\n", "c\n\nd"]
    texts, report = read(path, split="line")
    assert texts == ["a", "b", "---", "c", "d"] and report.skipped == {"blank": 3}
    inside = written(tmp_path / "b.txt", "a <|endoftext|> b\nc")
    assert read(inside)[0] == ["a <|endoftext|> b\nc"], "only a line of its own separates"


@pytest.mark.parametrize("limit", [1, 5, 37, 100])
def test_long_documents_are_cut_without_loss(tmp_path: Path, limit: int) -> None:
    text = (
        "".join(f"word{i}" + ("\n" if i % 4 == 0 else " ") * (i % 4 < 3) for i in range(200)) + "."
    )
    for path in (
        written(tmp_path / "a.txt", text + "\n"),
        jsonl(tmp_path / "a.jsonl", {"text": text}),
    ):
        texts, _ = read(path, max_document_chars=limit)
        assert "".join(texts) == text
        assert all(len(piece.rstrip()) <= limit and piece.strip() for piece in texts)
    texts, _ = read(tmp_path / "a.txt", max_document_chars=100)
    assert all(piece.endswith("\n") for piece in texts[:-1]), "cut at a newline where there is one"


def test_folders_and_globs_are_sorted_and_others_counted(tmp_path: Path) -> None:
    written(tmp_path / "b.txt", "b")
    written(tmp_path / "in" / "a.txt", "a")
    written(tmp_path / "notes.md", "notes")
    written(tmp_path / ".hidden", "x")
    texts, report = read(tmp_path)
    assert texts == ["b", "a"] and report.skipped == {"other file type": 1}
    assert read(str(tmp_path / "**" / "*.txt"))[0] == ["b", "a"]
    assert read(tmp_path / "in", tmp_path / "b.txt")[0] == ["a", "b"]
    odd = written(tmp_path / "odd[1].txt", "odd")
    assert read(odd)[0] == ["odd"], "a name that exists is no pattern"


def test_sources_that_cannot_be_read_are_refused_by_name(tmp_path: Path) -> None:
    empty = written(tmp_path / "empty.txt", "")
    assert f"{empty} is empty" in refusal(empty)
    packed = written(tmp_path / "empty.txt.gz", gzip.compress(b""))
    assert f"{packed} is empty" in refusal(packed)
    assert "no file or folder 'nowhere.txt'" in refusal("nowhere.txt")
    assert "no file matches" in refusal(str(tmp_path / "*.jsonl"))
    assert "no .txt, .jsonl, .parquet" in refusal(written(tmp_path / "d" / "x.pdf", "x").parent)
    other = written(tmp_path / "a.docx", "x")
    assert f"{other}: files of this type are not read; give .txt" in refusal(other)
    binary = written(tmp_path / "a.txt", b"PK\x00\x01")
    assert f"{binary} is binary" in refusal(binary)
    assert "no sources" in refusal()


def test_sources_are_checked_before_any_is_read(tmp_path: Path) -> None:
    good = written(tmp_path / "a.txt", "a")
    with pytest.raises(DataError, match=r"missing\.txt"):
        read_documents([good, tmp_path / "missing.txt"], ReadOptions(), ReadReport())


@pytest.mark.parametrize("suffix", [".gz", ".xz", ".zst"])
def test_a_damaged_compressed_file_is_refused(tmp_path: Path, suffix: str) -> None:
    text = "\n".join(str(i * i) for i in range(20_000)).encode()
    packed = PACKERS[suffix](text)
    short = written(tmp_path / f"short.txt{suffix}", packed[: len(packed) // 2])
    assert f"{short}: cannot be read to its end" in refusal(short)
    wrong = written(tmp_path / f"wrong.txt{suffix}", b"this is no archive")
    assert f"{wrong}: cannot be read to its end" in refusal(wrong)
    twice = written(tmp_path / f"twice.txt{suffix}", packed + packed)
    assert read(twice, max_document_chars=10**7)[0] == [(text + text).decode()]


def test_built_in_corpora_by_name() -> None:
    texts, report = read("builtin:stories:5", "builtin:ledgers:3")
    assert len(texts) == 8 and report.files == 0
    assert texts == read("builtin:stories:5")[0] + read("builtin:ledgers:3")[0]
    assert "did you mean 'stories'" in refusal("builtin:story")
    assert "'many' is not a number" in refusal("builtin:stories:many")


def test_the_hub_streams_and_says_when_it_cannot_be_reached(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingExtraError, match=r"loopwise\[hub\]"):
        read("hub:owner/name")

    def load_dataset(name: str, config: str = "", *, split: str, streaming: bool):
        assert streaming
        if name not in ("owner/name", "Salesforce/wikitext"):
            raise ConnectionError("no route")
        return iter([{"text": f"{config}{split} 1"}, {"text": ""}])

    fake = types.SimpleNamespace(load_dataset=load_dataset)
    monkeypatch.setitem(sys.modules, "datasets", fake)
    assert read("hub:owner/name")[0] == ["train 1"]
    assert read("hub:owner/name:test")[0] == ["test 1"]
    assert read("hub:owner/name/part-:test")[0] == ["part-test 1"]
    assert read("wikitext2")[0] == ["wikitext-2-raw-v1test 1"]
    message = refusal("hub:owner/other")
    assert "the hub cannot be reached" in message and "give the local" in message
    assert "must read hub:OWNER/NAME" in refusal("hub:name")
    assert "must read hub:OWNER/NAME" in refusal("hub:a/b/c/d")


def test_what_the_hub_client_retries_is_not_told_besides(monkeypatch, caplog) -> None:
    client = logging.getLogger("huggingface_hub")

    def load_dataset(*args: object, **options: object) -> None:
        logging.getLogger("huggingface_hub.utils._http").warning("Retrying in 1s [Retry 1/5].")
        raise ConnectionError("no network")

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    before = client.level
    assert "no network" in refusal("hub:owner/name")
    assert not caplog.records
    assert client.level == before


def test_options_are_checked() -> None:
    for wrong in (
        {"encoding_errors": "ignore"},
        {"split": "lines"},
        {"max_document_chars": 0},
        {"separator": ""},
        {"text_field": ""},
    ):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            ReadOptions(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("fraction", [1e-9, 0.1, 0.5, 1 - 1e-9])
def test_held_out_documents_are_chosen_by_hash(fraction: float) -> None:
    documents = [Document(f"text {i}") for i in range(400)]
    train, held_out = split_held_out(documents, fraction, seed=3)
    assert sorted([*train, *held_out], key=documents.index) == documents
    assert train and held_out and train == sorted(train, key=documents.index)
    assert abs(len(held_out) / 400 - fraction) < 0.06
    assert split_held_out(iter(documents), fraction, seed=3) == (train, held_out)
    if fraction == 0.5:
        assert split_held_out(documents, fraction, seed=4)[0] != train


def test_too_few_documents_cannot_be_split() -> None:
    with pytest.raises(DataError, match="1 document cannot be split"):
        split_held_out([Document("one")], 0.1, seed=0)
    with pytest.raises(ConfigError, match="between 0 and 1"):
        split_held_out([Document("one"), Document("two")], 1.0, seed=0)


@pytest.mark.parametrize(
    ("name", "text", "remedies"),
    [
        ("a.txt", "One.\nTwo.\n\nThree.\n", ("split=blank-line", "split=line", "chars=9")),
        ("a.txt", "One.\nTwo.\n", ("split=line", "chars=5")),
        ("a.txt", "One. Two.", ("chars=5",)),
        ("a.txt", "1", ()),
        ("a.jsonl", '{"text": "One.\\nTwo."}', ("chars=5",)),
    ],
)
def test_what_is_said_to_cut_the_only_document_does(
    tmp_path: Path, name: str, text: str, remedies: tuple[str, ...]
) -> None:
    """It named keys as nobody can type them, and ways that do nothing to such a file."""
    path = written(tmp_path / name, text)
    only = list(read_documents([path], ReadOptions(), ReadReport()))
    with pytest.raises(DataError) as caught:
        split_held_out(only, 0.1, seed=0)
    found = [part.split()[0] for part in str(caught.value).split("--set data.read.")[1:]]
    assert tuple(part.replace("max_document_", "") for part in found) == remedies
    for key, _, value in (part.partition("=") for part in found):
        cut, _ = read(path, **{key: int(value) if value.isdecimal() else value})
        assert len(cut) > 1, f"{key}={value}"
