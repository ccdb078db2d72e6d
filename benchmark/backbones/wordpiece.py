"""BERT's tokens: words of lower case without accents, cut into the longest known pieces (Wu et al., 2016)."""

import unicodedata
from collections.abc import Sequence
from pathlib import Path

from benchmark.errors import ConfigurationError
from benchmark.files import read_regular, reason

UNKNOWN, START, END = "[UNK]", "[CLS]", "[SEP]"
#: Letters of a word beyond which it is unknown, and bytes of a vocabulary's file.
LONGEST, MOST_BYTES = 100, 2**24


class WordPiece:
    """A tokenizer of ``bert-base-uncased`` and models with its vocabulary.

    Args:
        vocabulary: by id.

    Raises:
        ConfigurationError: it lacks one of the three special tokens.
    """

    def __init__(self, vocabulary: Sequence[str]) -> None:
        self.ids = {piece: number for number, piece in enumerate(vocabulary)}
        if missing := {UNKNOWN, START, END} - self.ids.keys():
            raise ConfigurationError(f"the vocabulary lacks {', '.join(sorted(missing))}; it is no BERT's")
        self.unknown, self.start, self.end = (self.ids[piece] for piece in (UNKNOWN, START, END))

    @classmethod
    def read(cls, path: Path) -> "WordPiece":
        """Read a ``vocab.txt``, a piece a line.

        Raises:
            ConfigurationError: it cannot be read.
        """
        try:
            return cls(read_regular(path, MOST_BYTES, links=True).decode().splitlines())
        except (OSError, UnicodeError) as error:
            raise ConfigurationError(f"the vocabulary {path} cannot be read: {reason(error)}") from error

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, without start and end."""
        return [number for word in _words(text) for number in self._pieces(word)]

    def _pieces(self, word: str) -> list[int]:
        """Return the longest known pieces of a word, from its front; those after the first begin with ``##``."""
        found: list[int] = []
        start = 0
        while start < len(word) <= LONGEST:
            prefix = "##" if start else ""
            ends = range(len(word), start, -1)
            end = next((end for end in ends if prefix + word[start:end] in self.ids), None)
            if end is None:
                return [self.unknown]
            found.append(self.ids[prefix + word[start:end]])
            start = end
        return found or [self.unknown]


def _words(text: str) -> list[str]:
    """Return words and punctuation marks of a text, in lower case and without accents."""
    plain = "".join(each for each in unicodedata.normalize("NFD", text.lower()) if unicodedata.category(each) != "Mn")
    spaced = "".join(f" {each} " if _is_punctuation(each) else each for each in plain)
    return spaced.split()


def _is_punctuation(letter: str) -> bool:
    code = ord(letter)
    of_ascii = 33 <= code <= 47 or 58 <= code <= 64 or 91 <= code <= 96 or 123 <= code <= 126
    return of_ascii or unicodedata.category(letter).startswith("P")
