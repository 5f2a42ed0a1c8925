"""Letters of the fonts that Matplotlib ships as classes of pictures: an Omniglot that is there.

A picture is one letter in one face (a font in one style), 28 x 28, turned by a multiple of 90
degrees. A class is what looks alike: (letter, turn) pairs whose pictures differ in any face by less
than ALIKE are one class, and all classes that share a letter stay on one side of the split. So 'A'
in Latin, Greek and Cyrillic is one class, and so are 'n' and a turned 'u'.

Shapes: L letters of a face, N pictures in all.
"""

import hashlib
import os
import tempfile
import unicodedata
from collections import Counter, defaultdict
from pathlib import Path
from zipfile import BadZipFile

import matplotlib
import numpy as np
import PIL
from matplotlib.ft2font import FT2Font
from PIL import Image, ImageFont

SIDE = 28
FINE = 4  # pixels are means of so many fine ones along each side
EM = 22  # size of the letters, in pixels
TURNS = 4
FACES = 12  # that a letter must be in, and pictures that a class must have
ALIKE = 0.01  # squared distance of two pictures over the product of their norms
SHARES = {"train": 0.64, "valid": 0.16, "test": 0.2}  # of the letters
VERSION = 1  # of what is in the cache


def load():
    """The classes of each split: {"train", "valid", "test": [pictures [n, 28, 28, 1] uint8, ...]}.

    They are rendered once (some 20 s) and kept in the user's cache folder; what is damaged there is
    rendered anew.
    """
    path = cache_folder() / f"glyphs-{_digest()}.npz"
    try:
        with path.open("rb") as file, np.load(file) as kept:
            pictures, class_of, family_of = (kept[name] for name in ("pictures", "class", "family"))
    except (OSError, ValueError, KeyError, BadZipFile):
        pictures, class_of, family_of = render()
        _write(path, {"pictures": pictures, "class": class_of, "family": family_of})
    splits: dict[str, list[np.ndarray]] = {name: [] for name in SHARES}
    starts = np.flatnonzero(np.diff(class_of, prepend=-1))
    for part in np.split(np.arange(len(class_of)), starts[1:]):
        splits[side(int(family_of[part[0]]))].append(pictures[part, :, :, None])
    return splits


def side(letter):
    """The split of a family of letters, by a hash of its first code point."""
    value = int.from_bytes(hashlib.sha256(str(letter).encode()).digest()[:6]) / 2**48
    bounds = np.cumsum(list(SHARES.values()))
    return list(SHARES)[int(np.searchsorted(bounds[:-1], value, side="right"))]


def render():
    """All classes.

    Returns:
      pictures [N, 28, 28] uint8; the class [N] of each, ascending from 0; and its family [N], the
      first letter of those that stay together.
    """
    fonts = faces()
    seen = Counter(letter for letters in fonts.values() for letter in letters)
    letters = sorted(letter for letter, number in seen.items() if number >= FACES)
    pictures = {path: turned(path, [x for x in letters if x in fonts[path]]) for path in fonts}
    classes = Union()
    for drawn in pictures.values():
        for one, other, turn in alike(drawn):
            for start in range(TURNS):
                classes.join((one, start), (other, (start + turn) % TURNS))
    members = defaultdict(list)
    for node in ((letter, turn) for letter in letters for turn in range(TURNS)):
        members[classes.first(node)].append(node)
    drawn = {first: distinct(pictures, members[first]) for first in sorted(members)}
    drawn = {first: found for first, found in drawn.items() if len(found) >= FACES}
    sizes = [len(found) for found in drawn.values()]
    # Where two letters share a class, they do so in all turns: the first letter tells them apart.
    family_of = [letter for letter, _ in drawn]
    return (
        np.concatenate(list(drawn.values())),
        np.repeat(np.arange(len(sizes)), sizes),
        np.repeat(family_of, sizes),
    )


def faces():
    """The faces to draw with, {file: code points of its letters}.

    Only those that show a letter where they say so: fonts of symbols and the fallback font, which
    has a picture for everything, do not.
    """
    found = {}
    for path in sorted(Path(matplotlib.get_data_path(), "fonts", "ttf").glob("*.ttf")):
        font = FT2Font(str(path))
        glyphs = font.get_charmap()
        if all(ord(x) in glyphs and font.get_glyph_name(glyphs[ord(x)]) == x for x in "Aa"):
            found[path] = {code for code in glyphs if unicodedata.category(chr(code))[0] == "L"}
    return found


def turned(path, letters):
    """Pictures of a face: {letter: [turns, 28, 28] uint8}, without letters that leave no ink."""
    font = ImageFont.truetype(str(path), EM * FINE, layout_engine=ImageFont.Layout.BASIC)
    found = {}
    for letter in letters:
        mask = font.getmask(chr(letter), mode="L")
        ink = np.asarray(mask, np.uint8).reshape(mask.size[::-1])
        if ink.any():
            ink = ink[_span(ink.any(1)), _span(ink.any(0))]
            found[letter] = np.stack([picture(np.rot90(ink, turn)) for turn in range(TURNS)])
    return found


def picture(ink):
    """Fine ink [h, w] in the middle of a picture, made smaller only where it does not fit."""
    fine = SIDE * FINE
    if max(ink.shape) > fine:
        scale = fine / max(ink.shape)
        size = [max(1, int(scale * length)) for length in ink.shape[::-1]]
        ink = np.asarray(Image.fromarray(ink).resize(size, Image.Resampling.BOX))
    canvas = np.zeros((fine, fine))
    top, left = ((fine - length) // 2 for length in ink.shape)
    canvas[top : top + ink.shape[0], left : left + ink.shape[1]] = ink
    return canvas.reshape(SIDE, FINE, SIDE, FINE).mean((1, 3)).round().astype(np.uint8)


def alike(drawn):
    """Triples (letter, other, turn) of a face, where a letter and the turned other look alike."""
    letters = list(drawn)
    flat = np.stack(list(drawn.values())).reshape(len(letters), TURNS, -1).astype(np.float32)
    upright, norms = flat[:, 0], np.linalg.norm(flat, axis=2)
    found = []
    for turn in range(TURNS):
        one, other = norms[:, :1], norms[None, :, turn]
        distance = one**2 + other**2 - 2 * upright @ flat[:, turn].T
        for i, j in np.argwhere(distance < ALIKE * one * other).tolist():
            if i != j or turn:
                found.append((letters[i], letters[j], turn))
    return found


def distinct(pictures, members):
    """The pictures of a class, one from each face that has it, none twice."""
    found: dict[bytes, np.ndarray] = {}
    for drawn in pictures.values():
        one = next((drawn[letter][turn] for letter, turn in members if letter in drawn), None)
        if one is not None:
            found.setdefault(one.tobytes(), one)
    return list(found.values())


class Union:
    """Disjoint sets; each is known by its smallest member."""

    def __init__(self):
        self._parent = {}

    def first(self, x):
        while (above := self._parent.setdefault(x, x)) != x:
            self._parent[x] = x = self._parent[above]
        return x

    def join(self, a, b):
        low, high = sorted((self.first(a), self.first(b)))
        self._parent[high] = low


def cache_folder():
    """The project's folder in the user's cache."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "redcoast-zoo"


def _digest():
    """Changes with whatever the pictures depend on."""
    made_by = (VERSION, matplotlib.__version__, PIL.__version__, SIDE, FINE, EM, FACES, ALIKE)
    return hashlib.sha256(repr(made_by).encode()).hexdigest()[:12]


def _write(path, arrays):
    """Writes a file in one move, so that nobody reads half of it; without a disk, not at all."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as part:
            np.savez_compressed(part, **arrays)
        Path(part.name).replace(path)
    except OSError as error:
        print(f"The rendered glyphs cannot be kept ({error}); each run renders them again.")


def _span(used):
    """From the first to the last of the rows or columns that are used."""
    where = np.flatnonzero(used)
    return slice(where[0], where[-1] + 1)
