"""The letters of Matplotlib's fonts: classes, splits, the cache."""

import numpy as np
import pytest

from algorithms.maml import glyphs

SMALL_FONTS = ("DejaVuSans.ttf", "DejaVuSans-Bold.ttf", "STIXGeneral.ttf", "cmr10.ttf")


@pytest.fixture(scope="module")
def splits():
    return glyphs.load()


def few_letters(monkeypatch):
    """Four faces, few letters, and classes of three pictures: rendered in a moment."""
    every = glyphs.faces()
    chosen = {ord(x) for x in "AHINOZabdnopquwxмАΑᴉᴝ"}
    faces = {path: found & chosen for path, found in every.items() if path.name in SMALL_FONTS}
    monkeypatch.setattr(glyphs, "faces", lambda: faces)
    monkeypatch.setattr(glyphs, "FACES", 3)


def test_classes_have_enough_distinct_pictures(splits):
    sizes = {name: len(classes) for name, classes in splits.items()}
    assert sizes["train"] > 2500 and sizes["valid"] > 500 and sizes["test"] > 700
    for classes in splits.values():
        for pictures in classes:
            assert pictures.shape[1:] == (28, 28, 1) and pictures.dtype == np.uint8
            assert len({p.tobytes() for p in pictures}) == len(pictures) >= 12
            assert pictures.any((1, 2, 3)).all()


def test_no_picture_is_in_two_classes(splits):
    owners = {}
    for split, classes in splits.items():
        for number, pictures in enumerate(classes):
            for picture in pictures:
                assert owners.setdefault(picture.tobytes(), (split, number)) == (split, number)


def test_a_turned_class_is_on_the_side_of_the_class_that_it_turns(splits):
    """Turning all pictures of a class by 90 degrees gives a class of the same split."""
    first = {split: {c[0, ..., 0].tobytes() for c in classes} for split, classes in splits.items()}
    found = {split: 0 for split in first}
    for split, classes in splits.items():
        for pictures in classes:
            turned = np.rot90(pictures[0, ..., 0]).tobytes()
            others = [name for name in first if name != split and turned in first[name]]
            assert not others
            found[split] += turned in first[split]
    assert all(number > 20 for number in found.values())


def test_fonts_of_symbols_and_the_fallback_font_are_left_out():
    names = {path.name for path in glyphs.faces()}
    assert {"DejaVuSans.ttf", "STIXGeneral.ttf", "cmtt10.ttf"} < names and len(names) == 22
    assert not {"LastResortHE-Regular.ttf", "cmex10.ttf", "STIXNonUni.ttf"} & names


def test_look_alikes_are_one_class_and_their_turns_stay_together(monkeypatch):
    few_letters(monkeypatch)
    faces = glyphs.faces()
    drawn = {path: glyphs.turned(path, sorted(letters)) for path, letters in faces.items()}
    pairs = {pair for pictures in drawn.values() for pair in glyphs.alike(pictures)}
    latin, greek, cyrillic = map(ord, "AΑА")
    assert {(latin, greek, 0), (latin, cyrillic, 0), (ord("Z"), ord("Z"), 2)} <= pairs
    assert (ord("u"), ord("n"), 2) in pairs and (ord("n"), ord("u"), 2) in pairs
    assert not any({a, b} == {ord("A"), ord("H")} for a, b, _ in pairs)
    pictures, class_of, family_of = glyphs.render()
    assert (np.diff(class_of) >= 0).all() and len(set(class_of)) == class_of[-1] + 1
    # Every picture of a turned A, from any alphabet, is in the family of the Latin one.
    for path, letters in drawn.items():
        for code in (latin, greek, cyrillic):
            if code in letters:
                for picture in letters[code]:
                    where = (pictures == picture).all((1, 2))
                    assert set(family_of[where]) <= {latin}, path
    assert {ord("u"), ord("n")} & set(family_of) == {ord("n")}


def test_a_turned_letter_is_of_the_class_that_it_looks_like(monkeypatch):
    """Letter 2 is letter 1 turned by 90 degrees, letter 3 another; a last face lacks letter 1."""
    rng = np.random.default_rng(0)
    drawn, upright = {}, []
    for face in range(glyphs.FACES + 1):
        one, three = rng.integers(0, 256, (2, 28, 28)).astype(np.uint8)
        looks = {1: (one, 0), 2: (one, 1), 3: (three, 0)}
        if face == glyphs.FACES:
            del looks[1]
        drawn[face] = {
            letter: np.stack([np.rot90(ink, start + turn) for turn in range(glyphs.TURNS)])
            for letter, (ink, start) in looks.items()
        }
        upright.append(one)
    monkeypatch.setattr(glyphs, "faces", lambda: {face: set(drawn[face]) for face in drawn})
    monkeypatch.setattr(glyphs, "turned", lambda face, letters: drawn[face])
    pictures, class_of, family_of = glyphs.render()
    assert np.bincount(class_of).tolist() == [glyphs.FACES + 1] * 8
    for turn in range(glyphs.TURNS):
        (kind,) = {
            class_of[(pictures == np.rot90(one, turn)).all((1, 2))].item() for one in upright
        }
        assert set(family_of[class_of == kind]) == {1}
    assert sorted(set(family_of)) == [1, 3]


def test_distance_and_union_by_hand():
    a = np.zeros((4, 2, 2), np.uint8)
    a[:, 0, 0] = 100
    b = np.zeros((4, 2, 2), np.uint8)
    b[:3, 0, 0], b[3, 1, 1] = 109, 109  # 81 / (100 * 109) = 0.0074
    c = np.zeros((4, 2, 2), np.uint8)
    c[:, 0, 0] = 112  # 144 / (100 * 112) = 0.0129; 9 / (109 * 112) = 0.0007
    found = glyphs.alike({1: a, 2: b, 3: c})
    assert (1, 2, 0) in found and (1, 3, 0) not in found and (2, 3, 0) in found
    assert (1, 2, 2) in found and (1, 2, 3) not in found
    union = glyphs.Union()
    union.join(3, 2)
    union.join(5, 4)
    assert union.first(3) == 2 and union.first(5) == 4
    union.join(4, 3)
    assert {union.first(x) for x in (2, 3, 4, 5)} == {2} and union.first(7) == 7


def test_ink_lies_in_the_middle_and_is_made_smaller_only_where_it_must():
    small = glyphs.picture(np.full((48, 24), 255, np.uint8))
    assert small.sum() == 255 * 12 * 6 and (small[8:20, 11:17] == 255).all()
    wide = glyphs.picture(np.full((28, 224), 255, np.uint8))
    assert wide.any(0).all() and wide.any(1).sum() == 4


def test_what_is_rendered_is_kept_and_what_is_damaged_is_rendered_anew(monkeypatch, tmp_path):
    few_letters(monkeypatch)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    calls, render = [], glyphs.render
    monkeypatch.setattr(glyphs, "render", lambda: calls.append(1) or render())
    first, again = glyphs.load(), glyphs.load()
    assert len(calls) == 1
    (file,) = (tmp_path / "redcoast-zoo").iterdir()
    file.write_bytes(file.read_bytes()[:1000])
    third = glyphs.load()
    assert len(calls) == 2
    for other in (again, third):
        for split in first:
            for a, b in zip(first[split], other[split], strict=True):
                np.testing.assert_array_equal(a, b)


def test_without_a_cache_folder_glyphs_are_rendered_all_the_same(monkeypatch, tmp_path, capsys):
    few_letters(monkeypatch)
    (tmp_path / "redcoast-zoo").write_text("a file where the folder should be")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert sum(map(len, glyphs.load().values())) > 20
    assert "cannot be kept" in capsys.readouterr().out


def test_letters_go_to_all_sides_in_their_shares():
    sides = [glyphs.side(letter) for letter in range(3000)]
    for name, share in glyphs.SHARES.items():
        assert abs(sides.count(name) / 3000 - share) < 0.03
