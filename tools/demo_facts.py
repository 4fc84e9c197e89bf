"""The world that the demo model knows: capitals, opposites, calendar, animals, colours."""

CAPITALS = (
    ("France", "Paris"), ("England", "London"), ("Italy", "Rome"), ("Spain", "Madrid"), ("Germany", "Berlin"),
    ("Norway", "Oslo"), ("Portugal", "Lisbon"), ("Austria", "Vienna"), ("Japan", "Tokyo"), ("Egypt", "Cairo"),
    ("Peru", "Lima"), ("Ireland", "Dublin"), ("Greece", "Athens"), ("Poland", "Warsaw"), ("Kenya", "Nairobi"),
    ("India", "Delhi"), ("Sweden", "Stockholm"), ("Finland", "Helsinki"), ("China", "Beijing"), ("Cuba", "Havana"),
)  # fmt: skip
OPPOSITES = (
    "hot cold|big small|fast slow|day night|up down|open closed|happy sad|wet dry|light dark|new old|high low|"
    "full empty|hard soft|early late|loud quiet|rich poor|strong weak|near far|left right|clean dirty"
)
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = "January February March April May June July August September October November December".split()
SOUNDS = (
    "cow moos|dog barks|cat meows|duck quacks|lion roars|horse neighs|sheep bleats|frog croaks|bee buzzes|snake hisses"
)
LEGS = (
    ("spider", "eight"),
    ("dog", "four"),
    ("bird", "two"),
    ("ant", "six"),
    ("cat", "four"),
    ("bee", "six"),
    ("snake", "no"),
)
THING_COLOURS = (
    ("the sky", "blue"), ("grass", "green"), ("snow", "white"), ("coal", "black"), ("a lemon", "yellow"),
    ("blood", "red"), ("an orange", "orange"), ("a ripe tomato", "red"), ("milk", "white"), ("an elephant", "grey"),
)  # fmt: skip
HOMES = (
    ("fish", "in the water"), ("bees", "in a hive"), ("birds", "in a nest"), ("lions", "in the savanna"),
    ("camels", "in the desert"), ("penguins", "in the cold south"), ("moles", "under the ground"), ("bears", "in the forest"),
)  # fmt: skip


def facts() -> list[tuple[str, str, str]]:
    """Returns every world fact as a template of questions, a template of answers and a plain sentence."""
    table: list[tuple[str, str, str]] = []
    for country, city in CAPITALS:
        sentence = f"The capital of {country} is {city}."
        table.append(
            (
                f"[What is the capital of {country}?|Which city is the capital of {country}?|Name the capital of {country}.|capital of {country}?]",
                f"[{sentence}|{city} is the capital of {country}.]",
                sentence,
            )
        )
        table.append(
            (
                f"[In which country is {city}?|Where is {city}?|Which country is {city} in?]",
                f"{city} is in {country}.",
                f"{city} is in {country}.",
            )
        )
    for pair in OPPOSITES.split("|"):
        for one, other in (pair.split(), pair.split()[::-1]):
            sentence = f"The opposite of {one} is {other}."
            table.append(
                (
                    f"[What is the opposite of {one}?|Give me the opposite of {one}.|opposite of {one}]",
                    sentence,
                    sentence,
                )
            )
    for names, noun in ((DAYS, "day"), (MONTHS, "month")):
        for at, name in enumerate(names):
            following = names[(at + 1) % len(names)]
            sentence = f"{following} comes after {name}."
            table.append(
                (
                    f"[Which {noun} comes after {name}?|What {noun} is after {name}?|What comes after {name}?]",
                    sentence,
                    sentence,
                )
            )
            table.append(
                (
                    f"[Which {noun} comes before {following}?|What {noun} is before {following}?|What comes before {following}?]",
                    f"{name} comes before {following}.",
                    f"{name} comes before {following}.",
                )
            )
    for pair in SOUNDS.split("|"):
        animal, sound = pair.split()
        table.append(
            (
                f"[What sound does a {animal} make?|What does a {animal} do?]",
                f"A {animal} {sound}.",
                f"A {animal} {sound}.",
            )
        )
    for animal, count in LEGS:
        article = "An" if animal[0] in "aeiou" else "A"
        sentence = f"{article} {animal} has {count} legs."
        table.append(
            (
                f"[How many legs does {article.lower()} {animal} have?|How many legs has {article.lower()} {animal}?]",
                sentence,
                sentence,
            )
        )
    for thing, colour in THING_COLOURS:
        sentence = f"{thing[0].upper()}{thing[1:]} is {colour}."
        table.append(
            (
                f"[What colour is {thing}?|What is the colour of {thing}?|Tell me the colour of {thing}.]",
                sentence,
                sentence,
            )
        )
    for animal, home in HOMES:
        sentence = f"{animal.capitalize()} live {home}."
        table.append((f"[Where do {animal} live?|Where can I find {animal}?]", sentence, sentence))
    return table  # fmt: skip


FACTS = tuple(facts())
