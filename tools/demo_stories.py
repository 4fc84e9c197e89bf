"""Short stories with a cause and an effect, and questions that their text answers.

A plot is a few templates with alternatives. Characters, place and object are drawn at random. A story also has the
questions that can be asked about it.
"""

import random
from dataclasses import dataclass

from tools.demo_words import SLOTS, Person, expand, two_people


@dataclass(frozen=True)
class Plot:
    """One chain of events. `main` names the slot that, with the plot and the place, tells stories apart."""

    name: str
    main: str
    lines: tuple[str, ...]
    questions: tuple[tuple[str, str], ...]
    moral: str


@dataclass(frozen=True)
class Story:
    """A story, its combination `key`, and pairs of a question and the answer found in the text."""

    text: str
    key: tuple[str, ...]
    questions: tuple[tuple[str, str], ...]
    hero: Person
    subject: str


PLOTS = (
    Plot(
        "lost",
        "obj",
        (
            "{hero} [had|owned|loved] {an_obj}[| that was a gift from {his} {relative}].",
            "[one day|one morning|after lunch], the {obj} was [gone|nowhere to be found|missing]. {hero} [looked everywhere|searched the whole house|felt very sad and began to cry].",
            '"[where could it be?|I must find my {obj}!|who has seen my {obj}?]" {he} [said|asked|cried].',
            '{friend} heard this and came to help. "[do not worry|do not cry|stay calm]," said {friend}. "[we will look together|let us look again|two can see more than one]."',
            "[they looked for a long time|they looked high and low|step by step they searched]. [at last|in the end|just before dark], they found the {obj} {spot}.",
            "{hero} [hugged {friend}|jumped for joy|laughed and thanked {friend}].",
        ),
        (
            ("What did {hero} lose?", "{hero} lost the {obj}."),
            ("Who helped {hero}?", "{friend} helped {hero}."),
            ("Where was the {obj}?", "The {obj} was {spot}."),
        ),
        "[from then on|after that day], {he} [always put the {obj} back in its place|took good care of the {obj}].",
    ),
    Plot(
        "rescue",
        "animal",
        (
            "[one day|one afternoon|on the way home], {hero} heard a [small|sad|strange] sound {spot}.",
            "it was {an_animal}. it was [stuck|trapped and could not move|afraid and could not get out].",
            '"[help me, please|please help|oh, help]!" [cried|called] the {animal}.',
            "{hero} [thought for a moment|did not wait|had an idea]. {he} ran [home|back] to get {an_tool}.",
            "with the {tool}, [{he} and {friend} set the {animal} free|{he} carefully got the {animal} out].",
            'the {animal} was [so happy|very thankful]. "[thank you, {hero}|you saved me|I will never forget this]," it said.',
        ),
        (
            ("What animal did {hero} find?", "{hero} found {an_animal}."),
            ("What did {hero} use to help?", "{hero} used {an_tool}."),
            ("Where was the {animal}?", "The {animal} was {spot}."),
        ),
        "[since that day|from that day on], {hero} and the {animal} [were best friends|met every morning|played together every day].",
    ),
    Plot(
        "sharing",
        "food",
        (
            "{hero} had [a big plate of|a basket with|some warm] {food} [for lunch|for the trip|from {his} {relative}].",
            "on the road {he} met {friend}. {friend} looked [tired and hungry|pale and sad|very hungry].",
            '"[are you hungry?|what is wrong?]" asked {hero}. "yes," said {friend}. "I have [not eaten all day|nothing to eat|lost my lunch]."',
            '"[then we will share|come and eat with me|take half of mine]," said {hero}, and gave {friend} some {food}.',
            "[a week later|the next day|soon after], {hero} [fell and hurt {his} leg|was lost in the dark|could not carry {his} heavy bag].",
            "{friend} came at once and helped {him}, because {friend} [remembered the {food}|had not forgotten {his} kindness].",
        ),
        (
            ("What did {hero} share?", "{hero} shared the {food}."),
            ("Who was hungry?", "{friend} was hungry."),
            ("Why did {friend} help {hero}?", "{friend} helped because {hero} had shared the {food}."),
        ),
        "[a kind heart is never forgotten|sharing makes two people happy|so one good turn led to another].",
    ),
    Plot(
        "storm",
        "game",
        (
            "{hero} and {friend} were playing {game} [outside|in the field|by the water].",
            "[suddenly|then|before long] the sky turned [dark|black|grey], and it began to [rain|thunder|storm].",
            '"[quick|run|hurry], we must find a dry place!" [shouted|cried|called] {friend}.',
            "they [ran and hid|found a place to hide] {spot}. {hero} was [afraid of the thunder|cold and wet|shaking], so {friend} [held {his} hand|told {him} a funny story|sang a song].",
            "[after an hour|after a while|at last] the rain stopped, and a [bright|beautiful|huge] rainbow stood in the sky.",
            '"[look|see]!" said {hero}. "[the storm brought us something good|I am not afraid any more]."',
        ),
        (
            ("What were they playing?", "They were playing {game}."),
            ("Where did they hide?", "They hid {spot}."),
            ("Who was with {hero}?", "{friend} was with {hero}."),
            ("What did they see after the rain?", "They saw a rainbow."),
        ),
        "then they [went home together|finished their game of {game}|walked home through the wet grass].",
    ),
    Plot(
        "broken",
        "obj",
        (
            "{hero} was playing [in the house|near the table|with the {obj} of {his} {relative}] when the {obj} [fell down and broke|broke in two pieces|cracked].",
            "{he} [felt terrible|was afraid|did not know what to do]. {he} hid the pieces {spot}.",
            "that night {hero} could not sleep. [the secret felt like a heavy stone|{he} thought about it again and again].",
            'in the morning {he} [went to|told] {his} {relative}. "I [broke|have broken] the {obj}. I am sorry," {he} said.',
            'the {relative} [smiled|was quiet for a moment|gave {him} a hug]. "[thank you for telling the truth|everyone makes mistakes|I am glad you told me]."',
            "together they [fixed the {obj} with glue|mended the {obj}|made the {obj} almost new].",
        ),
        (
            ("What broke?", "The {obj} broke."),
            ("Where did {hero} hide the pieces?", "{hero} hid the pieces {spot}."),
            ("Who forgave {hero}?", "{hero}'s {relative} forgave {him}."),
        ),
        "{hero} learned that [the truth makes the heart light|it is better to tell the truth].",
    ),
    Plot(
        "practice",
        "skill",
        (
            "{hero} wanted to learn to {skill}. [but it was hard|at first it went badly|the first try was a disaster].",
            '"[you will never do it|that looks silly]," said {friend} [and laughed|with a grin].',
            "{hero} did not give up. {he} practised [every day|every morning|all {season}], [even in the rain|again and again|a little better each time].",
            "[in {season}|at last|one day] there was a big contest [in the town|at the fair|at the school].",
            "{hero} could {skill} better than [anyone|all the others], and {he} won [first prize|a golden cup|a blue ribbon].",
            '"[I was wrong|I am sorry that I laughed|how did you do that?]" said {friend}. "[will you teach me?|can you show me?]"',
        ),
        (
            ("What did {hero} want to learn?", "{hero} wanted to learn to {skill}."),
            ("Who laughed at {hero}?", "{friend} laughed at {hero}."),
            ("Why did {hero} win?", "{hero} won because {he} practised a lot."),
        ),
        "[of course {hero} said yes|so {hero} taught {friend} to {skill}], and [they both became very good|now they practise together].",
    ),
    Plot(
        "baking",
        "ingredient",
        (
            "it was the birthday of {hero}'s {relative}. {hero} wanted to make {food}.",
            "but there was no {ingredient} in the house. [the shop was closed|{hero} had no money|the market was far away].",
            'so {hero} knocked on the door of {friend}. "[do you have some {ingredient}?|may I have a little {ingredient}?]" {he} asked.',
            '"[of course|yes, gladly|I have plenty of {ingredient}]," said {friend}. "[but may I help you?|come in!|may I taste it later?]"',
            "they [mixed and stirred|worked all morning|made a big mess], and soon the {food} smelled [wonderful|sweet|of home].",
            "the {relative} was [so surprised|very happy] and [kissed {hero}|ate two plates|invited {friend} to the party].",
        ),
        (
            ("What was missing?", "The {ingredient} was missing."),
            ("What did {hero} make?", "{hero} made {food}."),
            ("Who had a birthday?", "{hero}'s {relative} had a birthday."),
            ("Who gave the {ingredient}?", "{friend} gave the {ingredient}."),
        ),
        "[they all ate together until the evening|it was the best birthday of all].",
    ),
    Plot(
        "seed",
        "flower",
        (
            "in {season} {hero} found a [tiny|strange|brown] seed {spot}.",
            '"[what will it become?|I wonder what you are]," {he} said, and put it into the [ground|earth].',
            "[day after day|every morning] {he} gave it water. [for a long time|for many days] nothing happened.",
            '"[it is only a stone|nothing will grow|give up]," said {friend}. but {hero} was patient and [kept watering it|waited|did not stop].',
            "then, one [bright|warm|early] morning, a green leaf came out, and soon there was a [beautiful|tall|lovely] {colour} {flower}.",
            "{friend} could not believe it. [people came from far away to see it|even the birds came to look|the whole town talked about it].",
        ),
        (
            ("What grew from the seed?", "A {colour} {flower} grew from the seed."),
            ("Where did {hero} find the seed?", "{hero} found the seed {spot}."),
            ("Who said that nothing would grow?", "{friend} did not believe in the seed."),
        ),
        "[good things need time|patience had won], and {hero} gave {friend} [a new seed|one of its seeds].",
    ),
    Plot(
        "newcomer",
        "game",
        (
            "[a new family came to live there|someone new came to the place]. their child was called {friend}.",
            "{friend} was [shy|quiet|lonely] and sat alone {spot}[| every day].",
            '{hero} saw this and walked over. "[hello|hi], I am {hero}. do you want to play {game}?"',
            '"I do not know how," [whispered|said] {friend}. "[then I will show you|it is easy|I can teach you]," said {hero}.',
            "they played {game} until [the sun went down|dinner|the stars came out], and {friend} [laughed for the first time|smiled all the way home].",
            "[the next day|soon] {friend} gave {hero} {an_obj} [as a present|to say thank you].",
        ),
        (
            ("What game did they play?", "They played {game}."),
            ("What did {friend} give {hero}?", "{friend} gave {hero} {an_obj}."),
            ("Who was new?", "{friend} was new."),
            ("Where did {friend} sit?", "{friend} sat {spot}."),
        ),
        "[a friend is the best present|that is how a long friendship began].",
    ),
    Plot(
        "map",
        "treasure",
        (
            "{hero} found an old map {spot}. [a red cross was drawn on it|it showed a secret path].",
            '"[let us follow it|this must lead to a treasure]!" said {hero} to {friend}.',
            "they [crossed a river|climbed a hill|walked through a dark wood], [passed an old mill|counted fifty steps|turned left at a big stone], and started to dig with {an_tool}.",
            "[after a long time|suddenly] they hit something hard. it was a [wooden|rusty|heavy] box full of {treasure}.",
            '"[we are rich|how beautiful|I knew it]!" cried {friend}. {hero} [thought for a while|shook {his} head|smiled].',
            "they gave [half of it|most of it] to {hero}'s {relative}, who [had lost it long ago|needed it very much].",
        ),
        (
            ("What was in the box?", "There were {treasure} in the box."),
            ("Where did {hero} find the map?", "{hero} found the map {spot}."),
            ("What did they dig with?", "They dug with {an_tool}."),
        ),
        "[the real treasure was the day they had together|it had been a great adventure].",
    ),
    Plot(
        "night",
        "animal",
        (
            "one [dark|windy|cold] night, {hero} heard a noise {spot}.",
            '"[who is there?|is it a ghost?]" [whispered|asked] {hero}. [nobody answered|there was no answer]. {his} heart beat fast.',
            "{hero} woke {friend}, and they took {an_tool} and went to look, [step by step|very slowly|hand in hand].",
            "[something moved|two eyes shone in the dark|there was the noise again]! but it was only {an_animal} that was looking for [food|a warm place|its mother].",
            "{hero} and {friend} [laughed and laughed|felt very silly|were so glad].",
            "they gave the {animal} [some milk|a blanket|a little bread], and it [fell asleep|stayed until the morning].",
        ),
        (
            ("What made the noise?", "{an_animal} made the noise."),
            ("Where was the noise?", "The noise was {spot}."),
            ("Who went with {hero}?", "{friend} went with {hero}."),
        ),
        "after that night {hero} was [not afraid of the dark any more|braver than before].",
    ),
    Plot(
        "creature",
        "creature",
        (
            "[everyone|the whole town|every child] was afraid of the {creature} that lived [nearby|in the hills|beyond the river].",
            "every night it [roared|stole food|shook the trees]. [nobody dared to go near|people closed their doors].",
            '"[has anyone asked it why?|I will go and talk to it]," said {hero}. {friend} [was afraid but went along|said it was too dangerous|gave {him} some {food} for the way].',
            '{hero} found the {creature}. "why are you so angry?" {he} asked. the {creature} looked down. "I am not angry. I am [lonely|hungry|cold]," it said.',
            "so {hero} gave it {an_obj} and some {food}, and [sat down beside it|listened to its story].",
            "the {creature} [cried with joy|smiled for the first time], and it never [scared anyone|made trouble] again.",
        ),
        (
            ("Who were the people afraid of?", "They were afraid of the {creature}."),
            ("What did {hero} give the {creature}?", "{hero} gave it {an_obj} and some {food}."),
            ("Who talked to the {creature}?", "{hero} talked to the {creature}."),
        ),
        "[now the {creature} helps the people|every {season} they have a feast together], and {hero} [visits it often|is its best friend].",
    ),
)  # fmt: skip

OPENINGS = (
    "once upon a time[, in {place},| in {place}] there was {an_kind} [named|called] {hero}.",
    "once upon a time, {an_kind} [named|called] {hero} lived in {place}.",
    "once upon a time there lived {an_kind} whose name was {hero}. {hero} lived in {place}.",
    "long ago, in {place}, there lived {an_kind} [named|called] {hero}.",
    "there once was {an_kind} [named|called] {hero}, who lived in {place}.",
    "in {place} lived {an_kind} [named|called] {hero}.",
    "{hero} was {an_kind} who lived in {place}.",
    "{hero} lived in {place}. {he} was {an_kind}.",
    "one [sunny|rainy|quiet|cold] [morning|day|evening] in {place}, {an_kind} called {hero} [woke up early|looked out of the window].",
    "it was {season} in {place}, the home of {an_kind} [named|called] {hero}.",
    "this is the story of {hero}, {an_trait} {kind2} from {place}.",
    "my {relative} once told me about {hero}, {an_kind} from {place}.",
)
SECONDS = (
    "{hero} was very {trait}.",
    "everyone said that {hero} was {trait}.",
    "{he} was {trait} and had a good friend [named|called] {friend}.",
    "{his} best friend was {friend}, {an_fkind}.",
    "{hero} liked to play {game} with {his} friend {friend}.",
    "in {season} {he} liked to {skill}.",
)
CLOSINGS = ("the end.", "and they lived happily ever after.", "what a day it was!", "{hero} slept well that night.", "")
CONNECTORS = (
    "[a few days later|some time later|the next week|when {season} came], [there was more to tell|something else happened|{hero} had a new adventure].",
    "but that was not all.",
    "{hero} never forgot that day. and then came another one.",
)


def _slots(rng: random.Random, hero: Person, friend: Person) -> dict[str, str]:
    slots = {name: rng.choice(words) for name, words in SLOTS.items()}
    slots.update(hero=hero.name, kind=hero.kind, kind2=hero.kind.split()[-1], he=hero.he, him=hero.him, his=hero.his)
    slots.update(friend=friend.name, fkind=friend.kind)
    return slots


def story(rng: random.Random, episodes: int = 1) -> Story:
    """Tells a story of `episodes` plots about the same two characters in one place."""
    hero, friend = two_people(rng)
    slots = _slots(rng, hero, friend)
    place = slots["place"]
    sentences = [expand(rng, rng.choice(OPENINGS), slots)]
    if rng.random() < 0.75:
        sentences.append(expand(rng, rng.choice(SECONDS), slots))
    keys: list[str] = [place]
    questions = [
        (f"Where did {hero.name} live?", f"{hero.name} lived in {place}."),
        ("Who is the story about?", f"The story is about {hero.name}."),
    ]
    subject = ""
    for number, plot in enumerate(rng.sample(PLOTS, episodes)):
        if number:
            slots = _slots(rng, hero, friend) | {"place": place}
            sentences.append(expand(rng, rng.choice(CONNECTORS), slots))
        sentences += [expand(rng, line, slots) for line in plot.lines]
        sentences.append(expand(rng, plot.moral, slots))
        keys += [plot.name, slots[plot.main]]
        subject = slots[plot.main]
        if episodes == 1:
            questions += [
                (expand(rng, question, slots), expand(rng, answer, slots)) for question, answer in plot.questions
            ]
    sentences.append(expand(rng, rng.choice(CLOSINGS), slots))
    return Story(" ".join(filter(None, sentences)), tuple(keys), tuple(questions), hero, subject)
