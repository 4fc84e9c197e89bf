"""The words that the demo corpus is built from, and the template expander."""

import random
import re
from collections.abc import Mapping
from dataclasses import dataclass

_CHOICE = re.compile(r"\[([^\[\]]*)\]")
_SENTENCE_START = re.compile(r'(^|[.!?:]"? |\n|(?:^|[ \n])")([a-z])')
_SPEECH_VERB = re.compile(r"(he |she )?(said|asked|cried|whispered|called|shouted)")


@dataclass(frozen=True)
class Person:
    """A character: a name, what it is ("little girl"), and its pronouns."""

    name: str
    kind: str
    he: str
    him: str
    his: str


GIRLS = (
    "Lily Mia Anna Nora Zoe Ella Ruby Ivy Clara Maya Rosa Lucy Emma Sara Alice Hana Nina Olga Tess Wendy "
    "Amina Greta Leila Kira Stella"
).split()
BOYS = (
    "Tom Ben Sam Leo Max Finn Oscar Hugo Jack Theo Adam Paul Omar Felix Ravi Liam Noah Emil Kofi Peter "
    "Marco Yusuf Henry Anton Diego"
).split()
ANIMAL_NAMES = "Pip Momo Dot Bramble Tuck Hazel Nibbles Patch Willow Fern Biscuit Pepper Acorn Milo Clover".split()
GIRL_KINDS = ("little girl", "girl", "young farmer", "princess", "young baker", "clever girl")
BOY_KINDS = ("little boy", "boy", "young sailor", "prince", "young painter", "quiet boy")
ANIMAL_KINDS = (
    "small fox", "young rabbit", "little bear", "grey mouse", "baby owl", "brown squirrel", "tiny frog",
    "young otter", "white goat", "little hedgehog", "old turtle", "small robot",
)  # fmt: skip
SYLLABLES = (
    "ba be bo da de do fa fi ga go ka ke ki la le li lo ma mi mo na ne no ra ri ro sa so ta ti to va vi za zu".split()
)

PLACES = (
    "a small village", "a big city", "a quiet town by the sea", "a green valley", "a deep forest",
    "a house on a hill", "a farmhouse near the river", "a castle in the mountains", "a village on an island",
    "a town with red roofs", "a cottage by the lake", "a village under the snow", "a wide desert",
    "a harbour full of boats", "a street near the old bridge", "a garden behind the school",
    "a land of tall trees", "a tower by the wood", "a tent beside the lake", "a little house at the edge of town",
)  # fmt: skip
OBJECTS = (
    "red ball", "blue kite", "silver key", "wooden boat", "green hat", "golden ring", "toy train", "music box",
    "yellow scarf", "small drum", "picture book", "glass marble", "paper lantern", "brass bell", "warm blanket",
    "new bicycle", "old map", "white cup", "puppet", "feather pen", "orange umbrella", "tin whistle",
)  # fmt: skip
SPOTS = (
    "under the bed", "behind the door", "in the tall grass", "near the well", "under a big leaf", "in the barn",
    "beside the stream", "on top of the wall", "in an empty basket", "behind the oak tree", "inside an old boot",
    "under the bridge", "in the kitchen", "on the roof", "next to the pond", "between two rocks",
)  # fmt: skip
ANIMALS = (
    "kitten", "puppy", "duck", "bird", "lamb", "hedgehog", "rabbit", "owl", "squirrel", "frog", "pony", "turtle",
    "bee", "swan", "deer", "goose",
)  # fmt: skip
FOODS = (
    "apple pie", "bread", "honey cake", "vegetable soup", "cheese", "berry jam", "pancakes", "plum cake",
    "rice pudding", "pumpkin soup", "cookies", "lemon cake",
)  # fmt: skip
INGREDIENTS = ("flour", "sugar", "butter", "milk", "honey", "salt", "cream", "cinnamon", "yeast", "oil")
RELATIVES = ("mother", "father", "grandmother", "grandfather", "aunt", "uncle", "sister", "brother")
TOOLS = ("rope", "ladder", "long stick", "basket", "net", "shovel", "wooden plank", "lantern")
COLOURS = ("red", "blue", "green", "yellow", "white", "black", "purple", "orange", "pink", "brown", "grey", "golden")
GAMES = ("hide and seek", "chess", "tag", "football", "cards", "jump rope", "marbles", "catch")
SKILLS = (
    "swim", "dance", "sing", "ride a horse", "play the flute", "climb", "skate", "draw", "whistle", "juggle",
    "row a boat", "run fast",
)  # fmt: skip
TREASURES = ("gold coins", "old letters", "shiny stones", "silver spoons", "a tiny crown", "seeds of rare flowers")
FLOWERS = ("rose", "sunflower", "tulip", "daisy", "lily", "poppy", "bean plant", "pumpkin", "pear tree")
SEASONS = ("spring", "summer", "autumn", "winter")
TRAITS = (
    "curious", "brave", "shy", "kind", "clever", "cheerful", "patient", "stubborn", "gentle", "careful", "busy",
    "honest",
)  # fmt: skip
CREATURES = ("dragon", "giant", "troll", "wolf", "witch", "sea monster", "wild boar", "big bear")
SLOTS: Mapping[str, tuple[str, ...]] = {
    "place": PLACES, "obj": OBJECTS, "spot": SPOTS, "animal": ANIMALS, "food": FOODS, "ingredient": INGREDIENTS,
    "relative": RELATIVES, "tool": TOOLS, "colour": COLOURS, "game": GAMES, "skill": SKILLS,
    "treasure": TREASURES, "flower": FLOWERS, "season": SEASONS, "trait": TRAITS, "creature": CREATURES,
}  # fmt: skip


def an(noun: str) -> str:
    """Returns the noun with its indefinite article."""
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def invented_name(rng: random.Random) -> str:
    """Makes a name of two or three syllables. A model can only get it right by copying it."""
    return "".join(rng.choice(SYLLABLES) for _ in range(rng.choice((2, 2, 3)))).capitalize()


def person(rng: random.Random, *, animals: bool = True) -> Person:
    """Draws a character at random. One in four has an invented name."""
    role = rng.choice(("girl", "boy", "animal") if animals else ("girl", "boy"))
    if role == "girl":
        name, kind, pronouns = rng.choice(GIRLS), rng.choice(GIRL_KINDS), ("she", "her", "her")
    elif role == "boy":
        name, kind, pronouns = rng.choice(BOYS), rng.choice(BOY_KINDS), ("he", "him", "his")
    else:
        name, kind = rng.choice(ANIMAL_NAMES), rng.choice(ANIMAL_KINDS)
        pronouns = rng.choice((("she", "her", "her"), ("he", "him", "his")))
    if rng.random() < 0.25:
        name = invented_name(rng)
    return Person(name, kind, *pronouns)


def two_people(rng: random.Random, *, animals: bool = True) -> tuple[Person, Person]:
    """Draws two characters with different names."""
    first = second = person(rng, animals=animals)
    while second.name == first.name:
        second = person(rng, animals=animals)
    return first, second


def _capitalise(match: re.Match[str]) -> str:
    before, letter = match.groups()
    rest = match.string[match.start(2) :]
    # In `"Where is it?" asked Tom` the speech verb continues the sentence of the quotation.
    if before.endswith('" ') and _SPEECH_VERB.match(rest):
        return match.group(0)
    return before + letter.upper()


class _Slots(dict[str, str]):
    """Slots for `str.format_map`; `{an_obj}` is slot `obj` with its article."""

    def __missing__(self, key: str) -> str:
        if key.startswith("an_"):
            return an(self[key[3:]])
        raise KeyError(key)


def expand(rng: random.Random, template: str, slots: Mapping[str, str]) -> str:
    """Expands the template: takes one alternative of each `[a|b]` (they nest), fills `{slots}`, capitalises sentences."""
    while found := _CHOICE.search(template):
        template = template[: found.start()] + rng.choice(found[1].split("|")) + template[found.end() :]
    return _SENTENCE_START.sub(_capitalise, template.format_map(_Slots(slots)))
