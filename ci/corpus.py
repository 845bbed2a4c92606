"""The text that the small Gemma 4 is trained and judged on: documents that Debian 12's packages ship under free licences.

    python ci/corpus.py [--archives build/corpus/archives]

fetches the packages below, writes the training documents to build/corpus/train.jsonl.xz, and in checkpoints/gemma4-mini/ the
held-out documents as plain text with their licences and hashes, the hashes of the training documents, and the tokenizer.  The
same packages give the same bytes.

A document is one file of a package, normalised: UTF-8, NFC, \\n, no blanks at line ends, at most one empty line in a row; of
HTML, the text without navigation.  Left out are documents that are short (under 500 characters), equal to an earlier one, or more
than half made of shingles (13 words in a row) of earlier ones.

Held out are whole documents, in order of their SHA-256, of three sizes, at most a quarter of a size from one package.  A document
can be held out only where its package's documentation may be redistributed under a notice, and only if at most 5 % of its
distinct shingles occur in any other document.
"""

from __future__ import annotations

import argparse
import gzip
import json
import lzma
import re
import subprocess
import unicodedata
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing

ROOT = Path(__file__).resolve().parent.parent
MODEL = ROOT / "checkpoints" / "gemma4-mini"
TRAIN = ROOT / "build" / "corpus" / "train.jsonl.xz"
VOCABULARY = 2048
PAD, EOS, BOS = 0, 1, 2  # as Gemma4TextConfig has them
SHORTEST = 500  # characters of a document
SHINGLE = 13  # words
SIZES = ((40_000, 80_000, 90_000), (16_000, 40_000, 150_000), (3_000, 16_000, 170_000))  # from, below, together: bytes held out
FROM_ONE = 4  # at most 1/4 of a size's bytes from one package
SHARED = 0.05  # of a held-out document's shingles, with all others
REPEATED = 0.5  # of a document's shingles, with earlier ones


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A Debian package and the files of it that are documents."""

    package: str
    version: str
    sha256: str  # of the .deb
    licence: str  # of its documentation
    files: tuple[str, ...]  # globs from the package's root
    without: str = r"(?!)"  # regular expression: paths that are no documents
    heldout: bool = False  # its documents may be held out
    notice: str = ""  # the file that holds licence and copyright, from the package's root


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """One normalised document."""

    name: str  # path in its package
    source: Source
    text: str

    @property
    def sha256(self) -> str:
        """SHA-256 of its UTF-8 text."""
        return sha256(self.text.encode()).hexdigest()


LISTS = r"genindex|search\.html|py-modindex|/contents\.|bookindex|_modules/|print\.html|/all\.html|/toc\.html"
DOC = "usr/share/doc"
SOURCES = (
    Source(
        package="python3.11-doc",
        version="3.11.2-6+deb12u8",
        sha256="50eb63e7f636c4281e9ce1b8f10386f1def42159eddce34fc1f41c46261df71b",
        licence="PSF-2.0",
        files=(f"{DOC}/python3.11/html/_sources/**/*.txt",),
        heldout=True,
        notice=f"{DOC}/python3.11-doc/copyright",
    ),
    Source(
        package="python-sqlalchemy-doc",
        version="1.4.46+ds1-1",
        sha256="8805c3167ef75278ac6fd58ed9856321c2b2e3a7e441edba84b2eb955216d0fd",
        licence="MIT",
        files=(f"{DOC}/python-sqlalchemy-doc/html/**/*.html",),
        without=LISTS,
        heldout=True,
        notice=f"{DOC}/python-sqlalchemy-doc/copyright",
    ),
    Source(
        package="python-django-doc",
        version="3:3.2.25-0+deb12u3",
        sha256="33319c8e45b95693603213442ccf9bcee933ef338488115203ad25a0e01c696f",
        licence="BSD-3-Clause",
        files=(f"{DOC}/python-django-doc/html/**/*.html",),
        without=LISTS,
        heldout=True,
        notice=f"{DOC}/python-django-doc/copyright",
    ),
    Source(
        package="sqlite3-doc",
        version="3.40.1-2+deb12u2",
        sha256="466e30d7066e2641fa13e56bc662a2ad521b8cc9c17dde9c9dac3d4f105e32f2",
        licence="public domain",
        files=(f"{DOC}/sqlite3/**/*.html",),
        without=LISTS,
        heldout=True,
        notice=f"{DOC}/sqlite3-doc/copyright",
    ),
    Source(
        package="postgresql-doc-15",
        version="15.18-0+deb12u1",
        sha256="3c598277a463c44d672daa2c335deb8d8252e1852fb025fd4578ea2d9a1b90f0",
        licence="PostgreSQL",
        files=(f"{DOC}/postgresql-doc-15/html/*.html",),
        without=LISTS,
        heldout=True,
        notice=f"{DOC}/postgresql-doc-15/copyright",
    ),
    Source(
        package="python-pytest-doc",
        version="7.2.1-2",
        sha256="8cf17eb7826a2bbbc8207447fc888cbb75fd86680146542ebd9545e18229d3aa",
        licence="MIT",
        files=(f"{DOC}/python-pytest-doc/html/_sources/**/*.txt",),
    ),
    Source(
        package="python-flask-doc",
        version="2.2.2-3",
        sha256="0659f6a04b15fe3f907150cadc0399fe987c790e722e001b73f7e49fa5ecca15",
        licence="BSD-3-Clause",
        files=(f"{DOC}/python-flask-doc/html/_sources/**/*.txt",),
    ),
    Source(
        package="python-jinja2-doc",
        version="3.1.2-1+deb12u3",
        sha256="97b16e94881ccedd65c2b3b100497785089a4981cbcffcb03347e27b3d247931",
        licence="BSD-3-Clause",
        files=(f"{DOC}/python-jinja2-doc/html/_sources/**/*.txt",),
    ),
    Source(
        package="python-pandas-doc",
        version="1.5.3+dfsg-2",
        sha256="4998405ff6b12432f46594963e95554ade1104705795428396345fca58d853f8",
        licence="BSD-3-Clause",
        files=(f"{DOC}/python-pandas-doc/html/_sources/**/*.txt", f"{DOC}/python-pandas-doc/html/reference/api/*.html"),
    ),
    Source(
        package="python-sympy-doc",
        version="1.11.1-1",
        sha256="2a1d50bd49738f0280308fc8d86d5fa5739dbc6391e1c754f4549bc3635e6a31",
        licence="BSD-3-Clause",
        files=(f"{DOC}/python-sympy-doc/html/_sources/**/*.txt", f"{DOC}/python-sympy-doc/html/modules/**/*.html"),
        without=LISTS,
    ),
    Source(
        package="python-dask-doc",
        version="2022.12.1+dfsg-2",
        sha256="81fc4cc36bfc939ed9ff28c2423d921909cfbef1af69055131b79ab69a33b615",
        licence="BSD-3-Clause",
        files=(f"{DOC}/python-dask-doc/html/_sources/**/*.txt",),
    ),
    Source(
        package="cmake-doc",
        version="3.25.1-1",
        sha256="6e805a758ffed87cc7ea234cf0a7a1bb8ae78b93d8b5783e7fb989a6320f8133",
        licence="BSD-3-Clause",
        files=(f"{DOC}/cmake-data/html/_sources/**/*.txt",),
    ),
    Source(
        package="nodejs-doc",
        version="18.20.4+dfsg-1~deb12u2",
        sha256="9f674d3536be94923bb8720c48ec17bc92b8de62f2954c3172b59a3ada1de65f",
        licence="MIT",
        files=(f"{DOC}/nodejs/api/*.md*",),
        without=r"/all\.",
    ),
    Source(
        package="rust-doc",
        version="1.63.0+dfsg1-2",
        sha256="96ef96fe6df87d939ca713bd7df3d15c2b778ccb892eca025c4ee504146f697b",
        licence="MIT or Apache-2.0",
        files=tuple(
            f"{DOC}/rust-doc/html/{part}/**/*.html"
            for part in (
                "book",
                "nomicon",
                "reference",
                "rustc",
                "rust-by-example",
                "edition-guide",
                "embedded-book",
                "rustdoc",
                "std",
            )
        ),
        without=rf"{LISTS}|std/(arch|simd|os|ffi)/|/index\.html|/toc\.",
    ),
)


class _Words(HTMLParser):
    """Collects the readable text of a page: what `text` gives."""

    SKIPPED = frozenset({"script", "style", "nav", "head", "svg", "button", "noscript"})
    BLOCKS = re.compile(r"p|div|br|li|[uod]l|d[td]|tr|table|h[1-6]|pre|section|blockquote")
    NAVIGATION = re.compile(
        r"navheader|navfooter|(?<!with)sidebar|\brelated\b|headerlink|footer|menu|toc\b|src\b|copyright|\bnav\b"
    )
    FRAMES = re.compile(
        r"fixed-sidebar|docs-(narrow-)?(top|bottom)-navigation(-container)?|narrow-index-nav|sidebar-search|hd|ft|global-nav"
    )  # ids

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.pieces: list[str] = []
        self.skipping = ""  # the tag inside which nothing is read, and how often it is open
        self.depth = 0
        self.verbatim = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if self.skipping:
            self.depth += tag == self.skipping
            return
        classes = " ".join(value or "" for key, value in attrs if key in ("class", "role"))
        frame = self.FRAMES.fullmatch(dict(attrs).get("id") or "")
        if tag in self.SKIPPED or frame or (tag in ("div", "a", "footer") and self.NAVIGATION.search(classes)):
            self.skipping, self.depth = tag, 1
            return
        self.verbatim += tag == "pre"
        if self.BLOCKS.fullmatch(tag):
            self.pieces.append("\n")
        if re.fullmatch(r"p|h[1-6]|pre|dl|table|ul|ol|section", tag):
            self.pieces.append("\n")
        if tag == "li":
            self.pieces.append("* ")
        if tag in ("td", "th"):
            self.pieces.append(" ")

    def handle_endtag(self, tag: str) -> None:
        if self.skipping:
            self.depth -= tag == self.skipping
            if not self.depth:
                self.skipping = ""
            return
        if tag == "pre":
            self.verbatim = max(0, self.verbatim - 1)
        if self.BLOCKS.fullmatch(tag) and tag not in ("br", "li"):
            self.pieces.append("\n")

    def handle_data(self, data: str) -> None:
        if self.skipping:
            return
        if not self.verbatim:
            data = re.sub(r"\s+", " ", data)
            if self.pieces and self.pieces[-1].endswith(("\n", "* ")):
                data = data.lstrip()
        self.pieces.append(data)


def text_of_html(page: str) -> str:
    """The readable text of an HTML page: no scripts, no navigation; <pre> as it is, other blanks run together."""
    parser = _Words()
    parser.feed(page)
    parser.close()
    return "".join(parser.pieces)


def normalised(text: str) -> str:
    """`text` in NFC, no control characters, no blanks at line ends, no two empty lines in a row, one \\n at the end."""
    text = re.sub(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u00ad\u200b\ufeff]", "", text.replace("\r\n", "\n").replace("\r", "\n"))
    text = re.sub(r"[^\S\n\t]", " ", unicodedata.normalize("NFC", text))
    text = re.sub(r"[ \t]+\n", "\n", text + "\n")
    return re.sub(r"\n{3,}", "\n\n", text).strip("\n") + "\n"


def fetch(source: Source, folder: Path) -> Path:
    """The package of `source`, unpacked in a folder of `folder`.  Raises ValueError where its SHA-256 is another."""
    name = f"{source.package}_{source.version.replace(':', '%3a')}_all.deb"
    archive, unpacked = folder / name, folder / source.package
    if not archive.exists():
        subprocess.run(["apt-get", "--quiet", "download", f"{source.package}={source.version}"], cwd=folder, check=True)
    if (found := sha256(archive.read_bytes()).hexdigest()) != source.sha256:
        raise ValueError(f"{archive}: got SHA-256 {found}, expected {source.sha256}; delete the file to fetch it again")
    if not unpacked.exists():
        subprocess.run(["dpkg-deb", "--extract", archive, unpacked], check=True)
    return unpacked


def read(source: Source, unpacked: Path) -> Iterator[Document]:
    """The documents of a package in order of path, short ones left out."""
    for path in sorted({path for pattern in source.files for path in unpacked.glob(pattern) if path.is_file()}):
        name = path.relative_to(unpacked).as_posix()
        if re.search(source.without, f"/{name}"):
            continue
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        text = data.decode("utf-8", errors="replace")
        document = Document(name=name, source=source, text=normalised(text_of_html(text) if path.suffix == ".html" else text))
        if len(document.text) >= SHORTEST:
            yield document


def shingles(text: str) -> NDArray[np.uint64]:
    """Distinct hashes (uint64, ascending) of every 13 words in a row, lower case; of a shorter text, of all its words."""
    words = np.array([zlib.crc32(word.encode()) for word in re.findall(r"\w+", text.lower())] or [0], dtype=np.uint64)
    width = min(SHINGLE, len(words))
    total = np.zeros(len(words) - width + 1, np.uint64)
    for offset in range(width):
        total = total * np.uint64(0x9E3779B97F4A7C15) + words[offset : offset + len(total)]  # modulo 2**64
    return np.unique(total)


def without_repeats(documents: Iterable[Document]) -> list[Document]:
    """The documents less those equal to an earlier one or more than half made of shingles of earlier ones."""
    distinct: list[Document] = []
    hashes: set[str] = set()
    for document in documents:
        if document.sha256 not in hashes:
            hashes.add(document.sha256)
            distinct.append(document)
    parts = [shingles(document.text) for document in distinct]
    owner = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
    _, first, group = np.unique(np.concatenate(parts), return_index=True, return_inverse=True)  # the first occurrence
    earlier = np.bincount(owner, weights=owner[first][group] < owner, minlength=len(parts))
    return [document for document, part, seen in zip(distinct, parts, earlier, strict=True) if seen <= REPEATED * len(part)]


def shared_with_others(documents: Sequence[Document]) -> NDArray[np.float64]:
    """For each document, the share of its distinct shingles that some other document has."""
    parts = [shingles(document.text) for document in documents]
    owner = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
    _, group, count = np.unique(np.concatenate(parts), return_inverse=True, return_counts=True)
    shared = np.bincount(owner, weights=count[group] > 1, minlength=len(parts))
    return np.divide(shared, [len(part) for part in parts], dtype=np.float64)


def split(documents: Sequence[Document]) -> tuple[list[Document], list[Document]]:
    """Training documents in the order given, and held-out ones in order of their SHA-256, by the rule on top."""
    able = [d for d, share in zip(documents, shared_with_others(documents), strict=True) if d.source.heldout and share <= SHARED]
    heldout: dict[str, Document] = {}
    for smallest, below, together in SIZES:
        taken: Counter[str] = Counter()
        for document in sorted(able, key=lambda d: d.sha256):
            size, package = len(document.text.encode()), document.source.package
            if (
                not smallest <= size < below
                or taken.total() >= together
                or taken[package] + size > max(size, together / FROM_ONE)
            ):
                continue
            taken[package] += size
            heldout[document.sha256] = document
    return [d for d in documents if d.sha256 not in heldout], sorted(heldout.values(), key=lambda d: d.sha256)


def train_tokenizer(texts: Sequence[str]) -> Tokenizer:
    """A byte-level BPE of 2048 tokens learnt from `texts`: <pad> 0, <eos> 1, <bos> 2; encoding puts <bos> in front."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [AddedToken(name, special=True) for name in ("<pad>", "<eos>", "<bos>")]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=special,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = TemplateProcessing(single="<bos> $A", pair="<bos> $A <bos> $B", special_tokens=[("<bos>", BOS)])
    return tokenizer


def file_name(document: Document) -> str:
    """The name of a held-out document's file: package, then its path without what all paths of the package share."""
    short = re.sub(r"^usr/share/doc/[^/]+/((html|_sources)/)*", "", document.name)
    short = re.sub(r"(\.(rst|txt|html))+$", "", short)
    return re.sub(r"[^\w.]+", "-", f"{document.source.package}-{short}") + ".txt"


def write(train: Sequence[Document], heldout: Sequence[Document], unpacked: dict[str, Path]) -> None:
    """Writes everything that the top of this file names."""
    TRAIN.parent.mkdir(parents=True, exist_ok=True)
    with lzma.open(TRAIN, "wt", encoding="utf-8", newline="\n") as stream:
        for document in train:
            row = {"name": document.name, "package": document.source.package, "text": document.text}
            stream.write(json.dumps(row, ensure_ascii=False) + "\n")
    texts = MODEL / "text"
    for old in sorted(texts.glob("**/*.txt")):
        old.unlink()
    (texts / "LICENSES").mkdir(parents=True, exist_ok=True)
    rows = []
    for document in heldout:
        source = document.source
        (texts / file_name(document)).write_text(document.text, encoding="utf-8", newline="\n")
        notice = f"LICENSES/{source.package}.txt"
        (texts / notice).write_bytes((unpacked[source.package] / source.notice).read_bytes())
        rows.append(
            {
                "name": file_name(document),
                "package": source.package,
                "version": source.version,
                "path": document.name,
                "licence": source.licence,
                "notice": notice,
                "sha256": document.sha256,
            }
        )
    _dump(texts / "documents.json", rows)
    sizes: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for document in train:
        sizes[document.source.package] += len(document.text.encode())
        counts[document.source.package] += 1
    packages = [
        {
            "package": source.package,
            "version": source.version,
            "archive_sha256": source.sha256,
            "licence": source.licence,
            "documents": counts[source.package],
            "bytes": sizes[source.package],
        }
        for source in SOURCES
    ]
    _dump(MODEL / "training_documents.json", {"packages": packages, "sha256": sorted(document.sha256 for document in train)})


def write_tokenizer(texts: Sequence[str]) -> None:
    """Writes tokenizer.json and tokenizer_config.json, which transformers loads without code of ours."""
    train_tokenizer(texts).save(str(MODEL / "tokenizer.json"))
    names = {"pad_token": "<pad>", "eos_token": "<eos>", "bos_token": "<bos>"}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 8192, "clean_up_tokenization_spaces": False}
    _dump(MODEL / "tokenizer_config.json", settings | names)


def _dump(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8", newline="\n")


def training_texts() -> list[str]:
    """The training documents that `main` wrote, in its order."""
    with lzma.open(TRAIN, "rt", encoding="utf-8", newline="\n") as stream:
        return [json.loads(line)["text"] for line in stream]


def heldout_texts() -> dict[str, str]:
    """Name -> text of the held-out documents, in the manifest's order."""
    folder = MODEL / "text"
    rows = json.loads((folder / "documents.json").read_text(encoding="utf-8"))
    return {row["name"]: (folder / row["name"]).read_bytes().decode() for row in rows}


def encode(texts: Sequence[str]) -> list[NDArray[np.uint16]]:
    """Token ids (uint16) of each text, <bos> first, by the shipped tokenizer."""
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    return [np.array(encoding.ids, np.uint16) for encoding in tokenizer.encode_batch_fast(list(texts))]


def main() -> None:
    """Gathers, splits, writes, and says what there is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--archives", type=Path, default=TRAIN.parent / "archives", help="folder for the packages")
    folder = parser.parse_args().archives
    folder.mkdir(parents=True, exist_ok=True)
    unpacked = {source.package: fetch(source, folder) for source in SOURCES}
    documents = without_repeats(document for source in SOURCES for document in read(source, unpacked[source.package]))
    train, heldout = split(documents)
    write(train, heldout, unpacked)
    write_tokenizer([document.text for document in train])
    for source in SOURCES:
        for label, part in (("training", train), ("held out", heldout)):
            sizes = [len(d.text.encode()) for d in part if d.source is source]
            print(f"{source.package:24} {label}: {len(sizes):5} documents, {sum(sizes) / 1e6:7.2f} MB")
    lengths = [len(ids) - 1 for ids in encode([d.text for d in heldout])]
    print(f"held out: {len(heldout)} documents, {sum(len(d.text.encode()) for d in heldout)} bytes, {sum(lengths)} tokens,")
    print(f"  {sum(n // 512 for n in lengths)} blocks of 512, {sum(n // 4096 for n in lengths)} of 4096; longest {max(lengths)}")


if __name__ == "__main__":
    main()
