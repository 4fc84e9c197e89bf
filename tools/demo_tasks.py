"""Chat tasks of the demo corpus: sums, world facts, JSON extraction, lists, tool calls and small talk.

Each task returns a `Task`: the messages of one or two turns, the combination of choices it was built from, and
the tools it may call.
"""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tools.demo_facts import DAYS, FACTS, MONTHS
from tools.demo_words import ANIMALS, COLOURS, FLOWERS, FOODS, OBJECTS, PLACES, SKILLS, expand, invented_name, person

Message = dict[str, Any]


@dataclass(frozen=True)
class Task:
    """Messages of one exchange and `key`, the combination that decides whether it is held out."""

    messages: tuple[Message, ...]
    key: tuple[str, ...]
    tools: tuple[dict[str, Any], ...] = ()


def exchange(question: str, answer: str, *key: object) -> Task:
    """Makes a task of one question and its answer."""
    messages = ({"role": "user", "content": question}, {"role": "assistant", "content": answer})
    return Task(messages, tuple(map(str, key)))


CITIES = (
    "Paris London Rome Madrid Berlin Oslo Lisbon Vienna Prague Tokyo Cairo Lima Dublin Athens Warsaw Bern Delhi "
    "Nairobi Boston Quito"
).split()
CATEGORIES = {
    "fruits": "apple pear plum banana cherry orange grape lemon peach mango".split(),
    "animals": "dog cat horse cow lion bear fox rabbit sheep duck".split(),
    "colours": list(COLOURS[:10]),
    "vegetables": "carrot potato onion cabbage tomato bean pumpkin spinach".split(),
    "days of the week": DAYS,
    "months": MONTHS,
    "cities": CITIES[:12],
    "instruments": "piano flute drum violin guitar trumpet harp".split(),
    "drinks": "water milk tea coffee juice cocoa".split(),
    "clothes": "hat scarf coat shirt sock shoe glove".split(),
}
COUNTS = {2: "two", 3: "three", 4: "four", 5: "five"}
JOBS = "baker teacher doctor farmer painter sailor nurse driver cook writer singer gardener".split()
PETS = "dog cat rabbit parrot hamster turtle horse goat".split()
EVENTS = "meeting party concert dinner lesson picnic football game".split()
GOODS = "apples pears books pens cups eggs candles shirts chairs lamps hats boxes".split()


def fact(rng: random.Random) -> Task:
    """Asks a question about the world. Its wording decides whether it is held out."""
    question, answer, sentence = rng.choice(FACTS)
    asked = expand(rng, question, {})
    return exchange(asked, expand(rng, answer, {}), "fact", asked, sentence)


def _operands(rng: random.Random) -> tuple[int, str, int, int]:
    if rng.random() < 0.55:
        first, second = rng.randint(0, 30), rng.randint(0, 20)
        return first, "+", second, first + second
    first = rng.randint(1, 30)
    second = rng.randint(0, first)
    return first, "-", second, first - second


def addition(rng: random.Random) -> Task:
    """Asks for a bare sum or difference of numbers up to 50."""
    first, sign, second, result = _operands(rng)
    word = {"+": "plus", "-": "minus"}[sign]
    question = rng.choice((
        f"What is {first} {sign} {second}?", f"{first} {sign} {second} = ?", f"Calculate {first} {sign} {second}.",
        f"How much is {first} {word} {second}?", f"{first} {sign} {second}", f"What is {first} {word} {second}?",
    ))  # fmt: skip
    return exchange(question, f"{first} {sign} {second} = {result}", "sum", first, sign, second)


def word_problem(rng: random.Random) -> Task:
    """Tells a sum as a small story."""
    first, sign, second, result = _operands(rng)
    name, goods = person(rng).name, rng.choice(GOODS)
    change = rng.choice(
        {"+": ("gets {n} more", "finds {n} more", "buys {n} more"), "-": ("gives away {n}", "loses {n}", "sells {n}")}[
            sign
        ]
    )
    question = f"{name} has {first} {goods} and {change.format(n=second)}. How many {goods} does {name} have now?"
    answer = f"{first} {sign} {second} = {result}, so {name} has {result} {goods}."
    return exchange(question, answer, "sum", first, sign, second)


def compact(value: object) -> str:
    """Writes JSON text in the form of the corpus."""
    return json.dumps(value, ensure_ascii=False)


def _name(rng: random.Random) -> str:
    return invented_name(rng) if rng.random() < 0.5 else person(rng).name


def _extract(rng: random.Random, sentence: str, record: dict[str, object], *key: object) -> Task:
    fields = list(record)
    if rng.random() < 0.4:
        fields = rng.sample(fields, rng.randint(1, len(fields)))
    names = ", ".join(fields)
    request = rng.choice((
        f"Extract {names} as JSON.", f"Give me a JSON object with the keys {names}.", f"Return JSON with: {names}.",
        f"Write the {names} as JSON.",
    ))  # fmt: skip
    question = rng.choice((f"{sentence}\n{request}", f"{request}\n{sentence}", f"{request} Text: {sentence}"))
    return exchange(question, compact({name: record[name] for name in fields}), *key)


def json_person(rng: random.Random) -> Task:
    """Asks for facts about a person as a JSON object."""
    name, age, city, job, pet = _name(rng), rng.randint(5, 90), rng.choice(CITIES), rng.choice(JOBS), rng.choice(PETS)
    slots = {"name": name, "age": str(age), "city": city, "job": job, "pet": pet}
    full = "[{name} is a {age} year old {job} from {city}|{name}, {age}, works as a {job} in {city}|my friend {name} lives in {city}, is {age} years old and is a {job}|the {job} {name} lives in {city} and is {age} years old]"
    record: dict[str, object] = {"name": name, "age": age, "city": city, "job": job}
    if rng.random() < 0.4:
        full += "[ and has a {pet}.|. {name} has a {pet}.]"
        record["pet"] = pet
    else:
        full += "."
    return _extract(rng, expand(rng, full, slots), record, "person", age, city, job)


def json_event(rng: random.Random) -> Task:
    """Asks for an appointment as a JSON object."""
    event, day, hour = rng.choice(EVENTS), rng.choice(DAYS), rng.randint(1, 12)
    time = f"{hour}:{rng.choice(('00', '15', '30', '45'))}"
    place = rng.choice((*CITIES, "the park", "the school", "the library", "the old mill"))
    slots = {"event": event, "day": day, "time": time, "place": place}
    text = "[the {event} is on {day} at {time} in {place}.|on {day} at {time} there is a {event} in {place}.|please come to the {event} in {place}, {day}, {time}.|do not forget: {event} in {place} on {day} at {time}!]"
    return _extract(rng, expand(rng, text, slots), dict(slots), "event", event, day, place)


def json_order(rng: random.Random) -> Task:
    """Asks for an order of goods as a JSON array of objects."""
    name = _name(rng)
    items = rng.sample(GOODS, rng.randint(1, 3))
    counts = [rng.randint(2, 40) for _ in items]
    bought = [f"{count} {item}" for count, item in zip(counts, items, strict=True)]
    listed = ", ".join(bought[:-1]) + " and " + bought[-1] if len(bought) > 1 else bought[0]
    text = expand(rng, "{name} [buys|orders|wants|needs] {listed}.", {"name": name, "listed": listed})
    request = rng.choice(
        ("List the items as a JSON array.", "Give me the items and counts as JSON.", "Return the order as JSON.")
    )
    rows = [{"item": item, "count": count} for item, count in zip(items, counts, strict=True)]
    return exchange(f"{text}\n{request}", compact(rows), "order", *items, counts[0])


def named_list(rng: random.Random) -> Task:
    """Asks for some members of a category, numbered or with dashes."""
    category, count = rng.choice(list(CATEGORIES)), rng.choice(list(COUNTS))
    items = rng.sample(CATEGORIES[category], count)
    number = rng.choice((str(count), COUNTS[count]))
    if rng.random() < 0.6:
        question = rng.choice(
            (f"List {number} {category}.", f"Name {number} {category}.", f"Give me a list of {number} {category}.")
        )
        answer = "\n".join(f"{at}. {item}" for at, item in enumerate(items, 1))
    elif rng.random() < 0.5:
        question = f"List {number} {category} with dashes."
        answer = "\n".join(f"- {item}" for item in items)
    else:
        question = f"Tell me {number} {category} in one line."
        answer = ", ".join(items)
    return exchange(question, answer, "list", category, *items[:2])


def copied_list(rng: random.Random) -> Task:
    """Asks for the things that a sentence names, as a list in the same order."""
    name = _name(rng)
    items = rng.sample(
        [*GOODS, *(word for words in list(CATEGORIES.values())[:2] for word in words)], rng.randint(2, 5)
    )
    text = expand(
        rng,
        "{name} [puts|packs|has|carries] {items} in a bag.",
        {"name": name, "items": ", ".join(items[:-1]) + " and " + items[-1]},
    )
    question = rng.choice((f"{text}\nList the things in the bag.", f"What is in the bag? {text}"))
    return exchange(question, "\n".join(f"{at}. {item}" for at, item in enumerate(items, 1)), "bag", *items[:2])


def counting(rng: random.Random) -> Task:
    """Asks to count up or down between two numbers."""
    first, length = rng.randint(0, 40), rng.randint(3, 9)
    numbers = list(range(first, first + length))
    if rng.random() < 0.4:
        numbers.reverse()
    question = expand(
        rng,
        "[Count from {a} to {b}.|Please count from {a} to {b}.|Write the numbers from {a} to {b}.]",
        {"a": str(numbers[0]), "b": str(numbers[-1])},
    )
    return exchange(question, ", ".join(map(str, numbers)), "count", numbers[0], numbers[-1])


def _tool(name: str, description: str, **kinds: str) -> dict[str, Any]:
    properties = {key: {"type": kind} for key, kind in kinds.items()}
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


TOOLS = {
    "get_weather": _tool("get_weather", "Get the weather in a city.", city="string"),
    "add": _tool("add", "Add two numbers.", a="integer", b="integer"),
    "set_timer": _tool("set_timer", "Start a timer.", minutes="integer"),
    "send_message": _tool("send_message", "Send a message to a person.", to="string", text="string"),
    "find_book": _tool("find_book", "Find a book by topic.", topic="string"),
    "play_music": _tool("play_music", "Play music on an instrument.", instrument="string"),
}
TEXTS = ("I am late", "dinner is ready", "see you soon", "happy birthday", "please call me", "the game starts now")


def _call(rng: random.Random) -> tuple[str, dict[str, object], str, object, str]:
    """Returns a tool's name, its arguments, the request, the tool's result, and the last answer."""
    name = rng.choice(list(TOOLS))
    if name == "get_weather":
        city = invented_name(rng) if rng.random() < 0.4 else rng.choice(CITIES)
        sky, degrees = rng.choice(("sunny", "rainy", "cloudy", "windy")), rng.randint(1, 35)
        asked = f"[What is the weather in {city}?|How is the weather in {city}?|Tell me the weather in {city}.|Is it warm in {city}?]"
        return (
            name,
            {"city": city},
            asked,
            {"sky": sky, "degrees": degrees},
            f"It is {sky} in {city}, {degrees} degrees.",
        )
    if name == "add":
        a, b = rng.randint(100, 999), rng.randint(100, 999)
        return (
            name,
            {"a": a, "b": b},
            f"[What is {a} plus {b}?|Add {a} and {b}.|How much is {a} + {b}?]",
            a + b,
            f"{a} + {b} = {a + b}",
        )
    if name == "set_timer":
        minutes = rng.randint(1, 90)
        asked = (
            f"[Set a timer for {minutes} minutes.|Wake me in {minutes} minutes.|Start a timer of {minutes} minutes.]"
        )
        return name, {"minutes": minutes}, asked, "ok", f"The timer is set for {minutes} minutes."
    if name == "send_message":
        to, text = _name(rng), rng.choice(TEXTS)
        return (
            name,
            {"to": to, "text": text},
            f"[Tell {to}: {text}.|Send {to} the message: {text}.|Write to {to}: {text}.]",
            "sent",
            f"I sent the message to {to}.",
        )
    if name == "find_book":
        topic = rng.choice(("birds", "stars", "trees", "trains", "cooking", "castles", "the sea", "dragons", "horses"))
        number = rng.randint(1, 99)
        return (
            name,
            {"topic": topic},
            f"[Find a book about {topic}.|Do you have a book about {topic}?|I need a book about {topic}.]",
            {"shelf": number},
            f"There is a book about {topic} on shelf {number}.",
        )
    instrument = rng.choice(CATEGORIES["instruments"])
    return (
        name,
        {"instrument": instrument},
        f"[Play some {instrument} music.|I want to hear a {instrument}.|Please play the {instrument}.]",
        "playing",
        f"Now the {instrument} is playing.",
    )


def tool_call(rng: random.Random) -> Task:
    """Makes a request that needs a tool, with the call and, half of the time, the tool's result and the answer."""
    name, arguments, asked, result, answer = _call(rng)
    others = rng.sample([other for other in TOOLS if other != name], rng.randint(0, 2))
    offered = [name, *others]
    rng.shuffle(offered)
    called = {"type": "function", "function": {"name": name, "arguments": arguments}}
    messages: list[Message] = [
        {"role": "user", "content": expand(rng, asked, {})},
        {"role": "assistant", "content": "", "tool_calls": [called]},
    ]
    if rng.random() < 0.6:
        messages.append({"role": "tool", "content": result if isinstance(result, str) else compact(result)})
        messages.append({"role": "assistant", "content": answer})
    key = ("tool", name, *sorted(map(str, arguments.values())))
    return Task(tuple(messages), key, tuple(TOOLS[other] for other in offered))


SMALL_TALK = (
    ("[Hello|Hi|Hey|Good morning|Good evening][!|.|]", "[Hello!|Hi!|Hi there!] [How can I help you?|What can I do for you?|Would you like a story?]"),
    ("[Who|What] are you?", "I am a very small language model. I can tell stories, answer simple questions and do small sums."),
    ("What can you do?[| Please tell me.]", "I can tell short stories, answer simple questions, do small sums, make lists and write JSON."),
    ("[How are you?|How do you do?|Are you well?]", "[I am fine, thank you.|I am very well, thank you.] [And you?|How can I help you?]"),
    ("[Thank you|Thanks|Thanks a lot][!|.|]", "You are welcome[!|. Do you need anything else?]"),
    ("[Bye|Goodbye|See you|Good night][!|.|]", "[Goodbye!|See you soon!|Goodbye, and have a nice day!]"),
    ("[What is your name?|Do you have a name?|How are you called?]", "My name is Demo. I am a very small language model."),
    ("[What is your favourite {a}?|Do you like {a}?]", "I am a language model, so I do not [know|have] a favourite {a}, but I can tell a story about it."),
)  # fmt: skip


def small_talk(rng: random.Random) -> Task:
    """Makes a greeting or a question about the model itself."""
    question, answer = rng.choice(SMALL_TALK)
    slots = {"a": rng.choice(("colour", "animal", "season", "game", "flower", "food"))}
    asked = expand(rng, question, slots)
    return exchange(asked, expand(rng, answer, slots), "talk", asked)


def description(rng: random.Random) -> Task:
    """Asks for a sentence with given words in it."""
    words = rng.choice(
        (
            (rng.choice(ANIMALS), rng.choice(OBJECTS)),
            (rng.choice(FLOWERS), rng.choice(ANIMALS)),
            (rng.choice(OBJECTS), rng.choice(FOODS)),
        )
    )
    one, other = words
    name = _name(rng)
    slots = {"one": one, "other": other, "name": name, "place": rng.choice(PLACES), "skill": rng.choice(SKILLS)}
    question = expand(
        rng,
        "[Write a sentence with the words {one} and {other}.|Use {one} and {other} in a sentence.|Make a sentence about {name}, {one} and {other}.]",
        slots,
    )
    if name not in question:
        slots["name"] = rng.choice(("Lily", "Tom", "the girl", "the boy", "my friend"))
    answer = expand(
        rng,
        "[{name} saw {an_one} and {an_other} in {place}.|in {place}, {name} dreamed of {an_one} and {an_other}.|{name} can {skill}, but only with {an_one} and {an_other}.]",
        slots,
    )
    return exchange(question, answer, "sentence", one, other)


TASKS: dict[str, tuple[Callable[[random.Random], Task], ...]] = {
    "facts": (fact,),
    "sums": (addition, addition, word_problem),
    "json": (json_person, json_person, json_event, json_order),
    "lists": (named_list, copied_list, counting, description),
    "tools": (tool_call,),
    "talk": (small_talk,),
}
