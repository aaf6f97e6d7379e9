"""Word lists of the data generator, each divided into training words and held-out words for the scores.

The generator composes conversations from these lists and from the words that ``Lexicon`` invents. It reads no files.
"""

from __future__ import annotations

import copy
import random
import zlib
from collections.abc import Sequence
from enum import StrEnum

HELD_OUT_SHARE = 8
"""One word in this many is kept out of training."""


def listed(text: str, divider: str | None = None) -> tuple[str, ...]:
    """The entries of a text divided by white space, or by ``divider``."""
    return tuple(word.strip() for word in text.split(divider))


NOUNS = listed("""
    account address agenda alarm alert album analysis animal answer apartment application appointment archive
    article artist asset assignment attachment auction audit author backup badge balance banner basket batch
    benchmark bill blog bond book bookmark booking branch brand bridge broadcast budget bug build building bus
    cabin cache calendar call camera campaign candidate car card cart case catalog category certificate channel
    chapter charge chart chat checklist claim class client clinic cluster coach code color comment commit
    company component concert config connection contact container contest contract course coupon credit currency
    customer dashboard dataset deadline deal delivery department deployment design device diagram diet discount
    disk doctor document domain donation draft driver drone email employee endpoint energy engine episode error
    estimate event exam exhibition expense experiment export feature feed feedback ferry field file film filter
    flight folder font food forecast form formula forum fund game garage garden gift goal grade grant graph
    group guest guide habit hotel house image incident index ingredient insurance interview inventory invoice
    item job journal journey key keyword kitchen label lamp language lead lease lecture lesson letter library
    license link list loan location log lottery machine magazine mail map market match meal measurement medicine
    meeting member memo menu merchant message meter metric milestone mission mixture model module monitor movie
    museum network news note notebook notification number nutrition object offer office opinion order package
    page painting parcel park parking partner passenger password patch patient payment permission person phone
    photo pipeline plan planet plant playlist podcast poem policy poll portfolio position post prescription
    presentation price printer process product profile program project promotion property proposal protocol
    puzzle query question queue quiz quote rate rating receipt recipe record refund region registration reminder
    rent repair report repository request reservation resource restaurant resume review reward ride road robot
    role room route rule salary sale sample satellite schedule school score screen script season seat segment
    sensor server service session setting shelf shift shipment shop show signal site size sketch skill slide
    snapshot snippet song speaker sport spreadsheet stadium station statement stock store storm story stream
    street student studio subject subscription summary supplier survey switch symbol table tag target task tax
    taxi team template tenant test text thermostat thread ticket tide timer tire tool topic tour tournament
    track trade traffic trail train transaction transfer translation tree trend trial trip truck tutorial unit
    update upload user vaccine vehicle vendor venue version video visa visitor volume voucher wallet warehouse
    warranty webinar website wine workout workflow workspace zone
""")

VERBS: dict[str, tuple[str, ...]] = {
    "get": ("get", "show me", "fetch", "give me", "look up"),
    "fetch": ("fetch", "get", "pull up"),
    "find": ("find", "look for", "locate"),
    "search": ("search", "look for", "search for", "find"),
    "list": ("list", "show me", "show all"),
    "lookup": ("look up", "find", "check"),
    "show": ("show", "display", "show me"),
    "read": ("read", "open", "show"),
    "check": ("check", "verify", "look at"),
    "create": ("create", "make", "set up", "add"),
    "add": ("add", "create", "insert"),
    "make": ("make", "create", "prepare"),
    "build": ("build", "make", "put together"),
    "generate": ("generate", "produce", "create"),
    "update": ("update", "change", "edit", "modify"),
    "edit": ("edit", "change", "update"),
    "set": ("set", "change", "configure"),
    "delete": ("delete", "remove", "get rid of"),
    "remove": ("remove", "delete", "take out"),
    "cancel": ("cancel", "call off"),
    "send": ("send", "dispatch", "forward"),
    "share": ("share", "send"),
    "book": ("book", "reserve"),
    "reserve": ("reserve", "book"),
    "order": ("order", "buy"),
    "buy": ("buy", "purchase", "order"),
    "sell": ("sell",),
    "schedule": ("schedule", "plan", "arrange"),
    "plan": ("plan", "arrange"),
    "start": ("start", "launch", "begin"),
    "stop": ("stop", "halt", "end"),
    "restart": ("restart", "reboot"),
    "open": ("open",),
    "close": ("close", "shut"),
    "run": ("run", "execute", "start"),
    "execute": ("execute", "run"),
    "analyze": ("analyze", "examine", "study"),
    "compute": ("compute", "calculate", "work out"),
    "calculate": ("calculate", "compute", "work out"),
    "compare": ("compare",),
    "convert": ("convert", "turn"),
    "translate": ("translate",),
    "summarize": ("summarize", "sum up"),
    "export": ("export", "save"),
    "import": ("import", "load"),
    "upload": ("upload",),
    "download": ("download", "get"),
    "rename": ("rename",),
    "move": ("move",),
    "copy": ("copy", "duplicate"),
    "merge": ("merge", "combine", "join"),
    "split": ("split", "divide"),
    "validate": ("validate", "verify", "check"),
    "approve": ("approve", "accept"),
    "reject": ("reject", "decline"),
    "assign": ("assign", "give"),
    "track": ("track", "follow"),
    "monitor": ("monitor", "watch"),
    "rate": ("rate", "score"),
    "publish": ("publish", "release"),
    "archive": ("archive", "store away"),
    "restore": ("restore", "bring back"),
    "estimate": ("estimate", "guess"),
    "predict": ("predict", "forecast"),
    "register": ("register", "sign up"),
    "verify": ("verify", "confirm", "check"),
    "inspect": ("inspect", "look into"),
    "reset": ("reset",),
    "enable": ("enable", "turn on", "activate"),
    "disable": ("disable", "turn off", "deactivate"),
}

CITIES = listed(
    """
    Paris|London|Berlin|Tokyo|Madrid|Rome|Vienna|Prague|Lisbon|Dublin|Oslo|Stockholm|Helsinki|
    Copenhagen|Warsaw|Budapest|Athens|Istanbul|Cairo|Nairobi|Lagos|Accra|Cape Town|Johannesburg|
    Casablanca|Tunis|Dubai|Doha|Riyadh|Tehran|Mumbai|Delhi|Bangalore|Chennai|Kolkata|Karachi|Lahore|
    Dhaka|Colombo|Kathmandu|Bangkok|Hanoi|Manila|Jakarta|Singapore|Kuala Lumpur|Hong Kong|Shanghai|
    Beijing|Shenzhen|Seoul|Busan|Osaka|Kyoto|Sapporo|Taipei|Sydney|Melbourne|Perth|Brisbane|
    Auckland|Wellington|Honolulu|Vancouver|Toronto|Montreal|Ottawa|Calgary|New York|Boston|Chicago|
    Seattle|Portland|San Francisco|Los Angeles|San Diego|Las Vegas|Phoenix|Denver|Dallas|Austin|
    Houston|New Orleans|Miami|Atlanta|Orlando|Washington|Philadelphia|Detroit|Minneapolis|Mexico City|
    Guadalajara|Havana|Bogota|Lima|Quito|Santiago|Buenos Aires|Montevideo|Sao Paulo|São Paulo|
    Rio de Janeiro|Brasilia|Caracas|Amsterdam|Brussels|Antwerp|Hamburg|Munich|Frankfurt|Cologne|
    Zürich|Zurich|Geneva|Basel|Milan|Turin|Naples|Venice|Florence|Barcelona|Valencia|Seville|Porto|
    Lyon|Nice|Marseille|Bordeaux|Lille|Manchester|Liverpool|Edinburgh|Glasgow|Cardiff|Belfast|
    Reykjavik|Tallinn|Riga|Vilnius|Kyiv|Bucharest|Sofia|Belgrade|Zagreb|Ljubljana|Bratislava|
    Salzburg|Krakow|Gdansk|Malmö|Bergen|Aarhus|Tbilisi|Yerevan|Baku|Almaty|Tashkent|Ulaanbaatar|
    Addis Ababa|Kigali|Dakar|Kampala|Lusaka|Harare|Windhoek
""",
    "|",
)

FIRST_NAMES = listed("""
    Alice Bob Carol David Emma Frank Grace Henry Irene Jack Karen Liam Maria Noah Olivia Peter Quinn Rosa Samuel
    Tina Uma Victor Wendy Xavier Yara Zoe Aaron Bella Carlos Diana Elias Fatima George Hannah Ivan Julia Kevin
    Laura Marco Nina Oscar Paula Rachel Simon Teresa Umar Vera Walter Yusuf Zara Anna Ben Chloe Daniel Eva Felix
    Gina Hugo Ines Jonas Katya Leo Mia Nora Omar Priya Ravi Sofia Tom Lena Akira Mei Chen Aisha Kofi Ana Luis
    Ingrid Sven Pavel
""")

LAST_NAMES = listed("""
    Smith Jones Brown Taylor Wilson Davies Evans Thomas Johnson Roberts Walker Wright Robinson Thompson White Hughes
    Edwards Green Hall Wood Harris Lewis Martin Jackson Clarke Clark Turner Hill Scott Cooper Morris Ward Moore
    King Watson Baker Morgan Patel Young Allen Mitchell James Anderson Phillips Lee Bell Parker Davis Garcia
    Martinez Lopez Gonzalez Perez Sanchez Rossi Ferrari Muller Schmidt Schneider Fischer Weber Meyer Becker
    Novak Kim Park Tanaka Sato Suzuki Wang Li Zhang Liu Singh Kumar Sharma Gupta Khan Ali Hassan Okafor Mensah
    Silva Santos Costa Nielsen Hansen Larsen
""")

ADJECTIVES = listed("""
    active annual bright cheap clean cold daily deep digital easy empty fast final fresh full global good great
    green happy heavy high hot internal large latest light local long low main modern monthly new old open
    organic popular private public quick quiet rapid rare recent red remote safe secure short silent simple slow
    small smart soft solid special stable strong sunny sweet top urban urgent warm weekly wide wild young blue
    black white best
""")

TOPICS = listed("""
    python asyncio coffee hiking boots solar panels quantum computing electric bikes jazz history climate change
    machine learning football results healthy recipes rust lifetimes garden design renewable energy stock
    markets ancient rome space telescopes marathon training budget travel street food coral reefs chess openings
    cloud storage noise cancelling headphones tax rules home insulation medieval castles data privacy wind
    turbines sourdough bread battery recycling mountain weather river pollution guitar chords sleep quality
    urban farming database indexes docker networking kubernetes volumes redis eviction linux kernel memory leaks
    api versioning unit tests gpu prices paging tokens attention caches
""")

SYLLABLES = listed("""
    ba be bi bo bu da de di do du fa fe fi fo ga ge go ha he hi ho ja jo ka ke ki ko ku la le li lo lu ma me mi mo
    mu na ne ni no nu pa pe pi po ra re ri ro ru sa se si so su ta te ti to tu va ve vi vo wa we wi ya yo za ze
    zi zo an ar el en er il in is on or ul um al as et qua bri cla dre fla gro kra ple sta tri vex zor nyx lum
    tar mel dor fen gil
""")


class Split(StrEnum):
    """The part of every list that is used: training words, or words kept for the scores."""

    TRAIN = "train"
    HELD_OUT = "held_out"


def is_held_out(word: str) -> bool:
    """Whether ``word`` is kept out of training. A hash decides, so a new word moves no other."""
    return zlib.crc32(word.lower().encode()) % HELD_OUT_SHARE == 0


class Lexicon:
    """Draws words of one split. It filters every list once."""

    def __init__(self, split: Split, pieces: Sequence[str] = ()) -> None:
        self.split = split
        # Word pieces of a tokenizer. Words made of them give every token practice in copying.
        self.pieces = tuple(pieces)
        # Training has more invented words, so that the model learns to copy words and not to know them.
        self.coined = 0.45 if split is Split.TRAIN else 0.2
        self.nouns = self._own(NOUNS)
        self.cities = self._own(CITIES)
        self.first_names = self._own(FIRST_NAMES)
        self.last_names = self._own(LAST_NAMES)
        self.adjectives = self._own(ADJECTIVES)
        self.topics = self._own(TOPICS)

    def _own(self, words: Sequence[str]) -> tuple[str, ...]:
        held = self.split is Split.HELD_OUT
        return tuple(word for word in words if is_held_out(word) == held)

    def narrowed(self, rng: random.Random) -> Lexicon:
        """A lexicon of few of these words and some invented ones.

        A word then recurs in names, parameters and values of one conversation. Held-out words recur as often, because
        there are fewer of them. Invented words, which are never learned, also occur side by side.
        """
        few = copy.copy(self)
        few.coined = rng.uniform(0.1, 0.4)
        few.pieces = self.pieces if rng.random() < 0.5 else ()
        invented_share = rng.uniform(0.0, 0.7)
        few.nouns = self._few(rng, self.nouns, rng.randint(8, 60), invented_share)
        few.topics = self._few(rng, self.topics, rng.randint(6, 24), invented_share)
        few.adjectives = self._few(rng, self.adjectives, rng.randint(4, 10), invented_share)
        few.cities = self._few(rng, self.cities, rng.randint(6, 24), invented_share, capital=True)
        few.first_names = self._few(rng, self.first_names, rng.randint(5, 12), invented_share, capital=True)
        few.last_names = self._few(rng, self.last_names, rng.randint(8, 20), invented_share, capital=True)
        return few

    def _few(
        self, rng: random.Random, words: Sequence[str], count: int, invented_share: float, *, capital: bool = False
    ) -> tuple[str, ...]:
        """``count`` of ``words``, a share ``strange`` of them replaced by invented ones."""
        chosen = rng.sample(words, count)
        for i in range(count):
            if rng.random() < invented_share:
                word = self.invented(rng)
                chosen[i] = word.capitalize() if capital else word
        return tuple(chosen)

    def invented(self, rng: random.Random) -> str:
        """A pronounceable word that is in no list and, by its hash, in this split only.

        Its parts are the lexicon's pieces (if any), syllables, or the beginning of one noun and the end of another.
        """
        while True:
            if self.pieces and rng.random() < 0.6:
                word = "".join(rng.choices(self.pieces, k=rng.randint(1, 3)))
            elif rng.random() < 0.5:
                word = "".join(rng.choices(SYLLABLES, k=rng.randint(2, 4)))
            else:
                first, second = rng.choice(self.nouns), rng.choice(self.nouns)
                word = first[: rng.randint(2, max(2, len(first) - 2))] + second[-rng.randint(2, 5) :]
            if is_held_out(word) == (self.split is Split.HELD_OUT):
                return word

    def noun(self, rng: random.Random) -> str:
        """A noun of the list, or an invented one."""
        return self.invented(rng) if rng.random() < self.coined else rng.choice(self.nouns)

    def city(self, rng: random.Random) -> str:
        """A city, or an invented place."""
        return self.invented(rng).capitalize() if rng.random() < self.coined else rng.choice(self.cities)

    def person(self, rng: random.Random) -> str:
        """A first name, mostly with a last name."""
        first = self.invented(rng).capitalize() if rng.random() < self.coined else rng.choice(self.first_names)
        return first if rng.random() < 0.25 else f"{first} {rng.choice(self.last_names)}"

    def phrase(self, rng: random.Random, most: int = 4) -> str:
        """One to ``most`` lower-case words, as a search query or a title."""
        pool = (self.topics, self.nouns, self.adjectives)
        words = [rng.choice(pool[0 if rng.random() < 0.5 else rng.randrange(3)]) for _ in range(rng.randint(1, most))]
        if rng.random() < 2 * self.coined:
            words[rng.randrange(len(words))] = self.invented(rng)
        return " ".join(words)
