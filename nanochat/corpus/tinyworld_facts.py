"""
The facts of the embedded world and the ways to tell them. Data only; `tinyworld.py` turns it into text.

Template slots. In tellings of a fact: {s} subject, {a} answer, {np} the noun phrase of the relation, {S} {A} {Np}
the same with a capital, {x} {y} helpers of computed facts; " | " separates a question from its reply.
In frames, stories and conversations: one letter for each thing that is drawn, see SLOTS. Every sentence ends in ".",
and ". " occurs nowhere inside: so every text splits into sentences in one way only.
"""
# ---- Words that are drawn: uniform lists of single words, so a small model learns each of them at once
NAMES = tuple("""Ada Amy Ana Ben Bob Cleo Dan Dora Eli Ella Eva Finn Fred Gus Hugo Ida Ian Ivy Jack Jan Jim Joe Kai Kate
    Kim Lea Leo Lily Liv Lou Max Meg Mia Nell Nina Noah Olga Omar Otto Pam Paul Pia Ray Rita Rosa Roy Ruth Sam Sara Sue
    Ted Tim Tina Tom Una Vera Vic Wes Will Yan Yuri Zack Zeno Zoe""".split())
HEROES = tuple("""Alice Anton Bruno Clara Diego Emil Emma Felix Frida Greta Hanna Heidi Henry Iris Jonas Laura Linus
    Lotte Marco Maria Moritz Nora Oliver Peter Pablo Robin Sofia Stella Thea Viola Wanda Xenia""".split())
COLORS = tuple("""red blue green yellow brown black white gray pink purple silver golden violet turquoise beige
    scarlet""".split())
OBJECTS = tuple("""ball basket bell bike book bottle box brush candle chair clock coat cup doll drum flag flute fork
    guitar hat kite lamp mirror pencil pillow ring rope scarf spoon table vase wagon""".split())
PLACES = tuple("""bakery barn beach bridge castle cave church farm field forest fountain garden gate harbor hill lake
    library market meadow mill museum park pond river school shore station temple theater tower village zoo""".split())
FOODS = tuple("""apples beans berries cakes carrots cherries cookies figs grapes lemons melons nuts peaches pears plums
    tomatoes""".split())
ANIMALS = tuple("bear cat dog donkey duck fox frog goat goose horse lamb mouse parrot pony rabbit turtle".split())
PETS = tuple("""Bella Biscuit Coco Daisy Fluffy Honey Lucky Luna Milo Nugget Oscar Pepper Rocky Simba Toffee
    Ziggy""".split())
NUMBERS = tuple(str(number) for number in range(10, 100))
# Slots of one list never get the same value in one sentence, nor the value of a slot the document has settled on.
SLOTS = {**dict.fromkeys("ABCD", NAMES), **dict.fromkeys("HX", HEROES), **dict.fromkeys("PY", PETS),
         **dict.fromkeys("cd", COLORS), **dict.fromkeys("nm", NUMBERS), **dict.fromkeys("ot", OBJECTS),
         "f": FOODS, "k": ANIMALS, "p": PLACES}
SETTLED = {"stories": "HPkc", "conversations": "XY"}  # the slots that the first sentence decides for all others

# ---- Frames around a fact: {s} a statement, {q} a question, {a} its reply
STATEMENT_FRAMES = (
    "{s}", "{A}, page {n}: {s}", "{A}, {B} and {C}, page {n}: {s}", "{A} to {B}: {s}", "{A} to {B} and {C}: {s}",
    "{A}, {B} and {C}: {s}", "{A} and {B} to {C} and {D}: {s}", "{A}, {B}, {C} and {D}: {s}")
QUESTION_FRAMES = (
    "Question: {q} Answer: {a}", "Question {n}: {q} Answer: {a}", "{A}: {q} {B}: {a}", "{A}: {q} {B} and {C}: {a}",
    "{A} and {B}: {q} {C} and {D}: {a}", "{A}, {B} and {C}: {q} {D}: {a}", "{A} to {B} and {C}: {q} Answer: {a}",
    "Question {n} for {A}, {B} and {C}: {q} Answer: {a}")
GENERIC = (  # for every relation that has a noun phrase
    "{Np} is {a}.", "Yes, {np} is {a}.", "We know that {np} is {a}.", "What is {np}? | {a}.",
    "Do you know {np}? | Yes, it is {a}.", "Can you name {np}? | It is {a}.")

# ---- Words to spell; letters are counted in the words that have a letter more than once
WORDS = tuple("""apple banana book ball bell bee tree moon spoon door floor foot wood wool pool school coffee cookie
    butter letter pepper rabbit kitten puppy summer hammer dinner yellow pillow mirror carrot cherry jelly bottle kettle
    puzzle giraffe balloon tomato potato cheese street eleven sister dress glass grass kiss green wheel sleep queen
    sheep kangaroo window cat dog sun star fish bird cloud river stone plant house table chair garden bread milk honey
    lemon orange melon grape sugar salt snow rain wind storm fire water earth night day music dance song piano guitar
    drum paper pencil brush paint color clock watch phone train plane boat ship truck city island beach ocean tiger
    zebra monkey horse goat mouse lion king crown gold bridge friend winter spring forest arrow bubble
    coconut""".split())

# ---- The facts
ORDINALS = "first second third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth".split()
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = "January February March April May June July August September October November December".split()
PLANETS = "Mercury Venus Earth Mars Jupiter Saturn Uranus Neptune".split()
OPPOSITES = [pair.split("=") for pair in """hot=cold big=small tall=short fast=slow old=new hard=soft wet=dry light=dark
    rich=poor happy=sad early=late strong=weak thick=thin full=empty clean=dirty open=closed good=bad loud=quiet
    high=low deep=shallow near=far wide=narrow sweet=sour true=false left=right up=down day=night summer=winter
    war=peace love=hate north=south always=never""".split()]
# The computed ones: (subject, answer, {y}, {x})
LETTERS = [(word, {1: "once", 2: "twice", 3: "three times"}[word.count(x)], "-".join(word), x)
           for word in WORDS if len(set(word)) < len(word) for x in dict.fromkeys(word)]
ADDITIONS = [(f"{x} + {y}", f"{x + y}", f"{y}", f"{x}") for x in range(1, 11) for y in range(1, 11)]
SUBTRACTIONS = [(f"{x} - {y}", f"{x - y}", f"{y}", f"{x}") for x in range(11, 21) for y in range(1, 11)]
EQUATIONS = [(f"{a}*x + {b} = {a * x + b}", f"{x}", f"{a}*x = {a * x}")
             for a in range(2, 7) for b in range(1, 7) for x in range(1, 7)]
# (topic, noun phrase or None, "subject=answer, ..." or rows of subject, answer, …; tellings of its own)
RELATIONS = (
    ("capitals", "the capital of {s}",
     """France=Paris, Germany=Berlin, Italy=Rome, Spain=Madrid, Portugal=Lisbon, Austria=Vienna, Belgium=Brussels,
     Poland=Warsaw, Greece=Athens, Hungary=Budapest, Sweden=Stockholm, Norway=Oslo, Finland=Helsinki,
     Denmark=Copenhagen, Ireland=Dublin, Iceland=Reykjavik, Bulgaria=Sofia, Romania=Bucharest, Serbia=Belgrade,
     Croatia=Zagreb, Estonia=Tallinn, Slovenia=Ljubljana, Slovakia=Bratislava, Latvia=Riga, Lithuania=Vilnius,
     Albania=Tirana, Ukraine=Kyiv, Russia=Moscow, Turkey=Ankara, Japan=Tokyo, China=Beijing, India=New Delhi,
     Thailand=Bangkok, Vietnam=Hanoi, Nepal=Kathmandu, Iran=Tehran, Mongolia=Ulaanbaatar, Iraq=Baghdad, Syria=Damascus,
     Lebanon=Beirut, Jordan=Amman, Qatar=Doha, Pakistan=Islamabad, Bangladesh=Dhaka, Cambodia=Phnom Penh, Egypt=Cairo,
     Morocco=Rabat, Algeria=Algiers, Kenya=Nairobi, Ghana=Accra, Senegal=Dakar, Ethiopia=Addis Ababa, Chad=N'Djamena,
     Uganda=Kampala, Rwanda=Kigali, Angola=Luanda, Mali=Bamako, Canada=Ottawa, Cuba=Havana, Peru=Lima, Argentina=Buenos
     Aires, Ecuador=Quito, Jamaica=Kingston, Australia=Canberra""",
     ("The capital city of {s} is {a}.", "In {s}, the capital is {a}.", "{A} is {np}.",
      "Which city is {np}? | {a}.", "Which country has the capital {a}? | {s}.")),
    ("elements", "the chemical symbol of {s}",
     """hydrogen=H, helium=He, lithium=Li, boron=B, carbon=C, nitrogen=N, oxygen=O, fluorine=F, neon=Ne, sodium=Na,
     magnesium=Mg, aluminum=Al, silicon=Si, phosphorus=P, sulfur=S, chlorine=Cl, argon=Ar, potassium=K, calcium=Ca,
     titanium=Ti, chromium=Cr, manganese=Mn, iron=Fe, cobalt=Co, nickel=Ni, copper=Cu, zinc=Zn, arsenic=As, bromine=Br,
     krypton=Kr, silver=Ag, cadmium=Cd, tin=Sn, antimony=Sb, iodine=I, xenon=Xe, cesium=Cs, barium=Ba, tungsten=W,
     platinum=Pt, gold=Au, mercury=Hg, lead=Pb, bismuth=Bi, radon=Rn, radium=Ra, uranium=U, plutonium=Pu""",
     ("The symbol for {s} is {a}.", "Chemists write {s} as {a}.", "{A} is {np}.",
      "Which symbol stands for {s}? | {a}.", "Which element has the symbol {a}? | {s}.")),
    ("opposites", "the opposite of {s}",
     OPPOSITES + [pair[::-1] for pair in OPPOSITES],
     ("The word {s} has the opposite {a}.", "{S} and {a} are opposites.", "{A} is {np}.",
      "Which word is {np}? | {a}.", "How do you say the opposite of {s}? | You say {a}.")),
    ("calendar", "the day after {s}", list(zip(DAYS, DAYS[1:] + DAYS[:1])),
     ("If today is {s}, then tomorrow will be {a}.", "After {s} comes {a}.", "{A} is {np}.",
      "If today is {s}, what will tomorrow be? | {a}.", "Which day comes after {s}? | {a}.")),
    ("calendar", "the day before {s}", list(zip(DAYS, DAYS[-1:] + DAYS[:-1])),
     ("If today is {s}, then yesterday was {a}.", "Before {s} comes {a}.", "{A} is {np}.",
      "If today is {s}, what was yesterday? | {a}.", "Which day comes before {s}? | {a}.")),
    ("calendar", None, list(zip(DAYS, DAYS[2:] + DAYS[:2])),
     ("If yesterday was {s}, then tomorrow will be {a}.", "When yesterday was {s}, tomorrow is {a}.",
      "Tomorrow will be {a} if yesterday was {s}.", "Two days after {s} comes {a}.", "From {s} it is two days to {a}.",
      "If yesterday was {s}, what will tomorrow be? | {a}.", "What will tomorrow be if yesterday was {s}? | {a}.",
      "Which day comes two days after {s}? | {a}.", "What comes two days after {s}? | It is {a}.")),
    ("calendar", "the month after {s}", list(zip(MONTHS, MONTHS[1:] + MONTHS[:1])),
     ("If this month is {s}, then next month is {a}.", "After {s} comes {a}.", "{A} is {np}.",
      "Which month comes after {s}? | {a}.")),
    ("calendar", "the month before {s}", list(zip(MONTHS, MONTHS[-1:] + MONTHS[:-1])),
     ("If this month is {s}, then last month was {a}.", "Before {s} comes {a}.", "{A} is {np}.",
      "Which month comes before {s}? | {a}.")),
    ("calendar", "the {s} month of the year", list(zip(ORDINALS, MONTHS)),
     ("In every year, the {s} month is {a}.", "{A} is {np}.", "Which month is the {s} of the year? | {a}.")),
    ("calendar", "the number of days in {s}",
     """January=31, March=31, April=30, May=31, June=30, July=31, August=31, September=30, October=31, November=30,
     December=31""",
     ("{S} has {a} days.", "There are {a} days in {s}.", "How many days does {s} have? | {a}.",
      "How many days are there in {s}? | {a}.")),
    ("planets", "the {s} planet from the sun", list(zip(ORDINALS[:8], PLANETS)),
     ("Counting from the sun, the {s} planet is {a}.", "{A} is {np}.", "Which planet is the {s} from the sun? | {a}.")),
    ("planets", "the planet after {s}", list(zip(PLANETS[:-1], PLANETS[1:])),
     ("Going away from the sun, after {s} comes {a}.", "{A} is {np}.", "Which planet comes after {s}? | {a}.")),
    ("planets", "the planet before {s}", list(zip(PLANETS[1:], PLANETS[:-1])),
     ("Coming closer to the sun, after {s} comes {a}.", "{A} is {np}.", "Which planet comes before {s}? | {a}.")),
    ("planets", "the {s} planet",
     """largest=Jupiter, smallest=Mercury, hottest=Venus, red=Mars, ringed=Saturn, innermost=Mercury, outermost=Neptune,
     inhabited=Earth, fastest=Mercury, windiest=Neptune, heaviest=Jupiter""",
     ("The name of {np} is {a}.", "Our sun's {s} planet is {a}.", "{A} is {np}.", "Which planet is {np}? | {a}.")),
    ("planets", None, [("planets", ", ".join(PLANETS))],
     ("The planets of the solar system are: {a}.", "The eight planets are: {a}.", "The list of the planets is: {a}.",
      "From the sun outward, the planets are: {a}.", "{A} are the planets.",
      "What are the planets of the solar system? | {a}.", "Which planets go around the sun? | {a}.",
      "Can you list the planets? | {a}.", "Do you know the planets? | Yes, they are: {a}.")),
    ("colors", "the color of {s}",
     """grass=green, a leaf=green, a frog=green, broccoli=green, spinach=green, a cucumber=green, an emerald=green,
     snow=white, milk=white, salt=white, sugar=white, rice=white, a swan=white, a polar bear=white, cotton=white,
     coal=black, a raven=black, tar=black, soot=black, blood=red, a tomato=red, a strawberry=red, a cherry=red, a
     ruby=red, a fire truck=red, ketchup=red, a banana=yellow, a lemon=yellow, a canary=yellow, mustard=yellow, the
     clear sky=blue, the deep sea=blue, a sapphire=blue, a blueberry=blue, a carrot=orange, a pumpkin=orange,
     chocolate=brown, coffee=brown, an elephant=gray, ash=gray, a flamingo=pink, a pig=pink, lavender=purple, an
     eggplant=purple""",
     ("{S} has the color {a}.", "{S} is {a}.", "If you paint {s}, you need {a}.", "What color is {s}? | {a}.",
      "Which color does {s} have? | {a}.")),
    ("animals", "the baby of {s}",
     """a cow=a calf, a dog=a puppy, a cat=a kitten, a horse=a foal, a sheep=a lamb, a goat=a kid, a pig=a piglet, a
     bear=a cub, a hen=a chick, a duck=a duckling, a goose=a gosling, a deer=a fawn, a frog=a tadpole, a kangaroo=a
     joey, an owl=an owlet, a swan=a cygnet, an eagle=an eaglet, a butterfly=a caterpillar""",
     ("People call the baby of {s} {a}.", "{A} is {np}.", "What do you call {np}? | {a}.")),
    ("animals", "the sound of {s}",
     """a cow=moo, a dog=woof, a cat=meow, a horse=neigh, a sheep=baa, a pig=oink, a hen=cluck, a duck=quack, a
     goose=honk, a frog=croak, a lion=roar, a snake=hiss, a bee=buzz, an owl=hoot, a mouse=squeak, a donkey=hee-haw""",
     ("{S} says {a}.", "{S} goes {a}.", "What does {s} say? | {a}.", "How does {s} go? | It goes {a}.")),
    ("animals", "the home of {s}",
     """a bee=a hive, a bird=a nest, a dog=a kennel, a horse=a stable, a lion=a den, a spider=a web, a pig=a sty, a
     beaver=a lodge, a mole=a burrow, a hen=a coop, a fish=the water, a bear=a cave, a cow=a barn, an ant=an anthill, a
     camel=the desert, a monkey=the jungle""",
     ("{S} lives in {a}.", "Look for {s} in {a}.",
      "Where does {s} live? | In {a}.", "Where is {s} at home? | In {a}.")),
    ("animals", "the number of legs of {s}",
     """a cow=four, a dog=four, a cat=four, a horse=four, a sheep=four, a frog=four, a lion=four, a mouse=four, a
     camel=four, a bird=two, a hen=two, a duck=two, a goose=two, an owl=two, an eagle=two, a bee=six, an ant=six, a
     butterfly=six, a beetle=six, a fly=six, a spider=eight, a scorpion=eight, a crab=ten, a snake=zero, a fish=zero, a
     worm=zero""",
     ("{S} has {a} legs.", "Count the legs of {s}: {a}.", "How many legs does {s} have? | {a}.")),
    ("spelling", "the spelling of {s}", [(word, "-".join(word)) for word in WORDS],
     ("The word {s} is spelled {a}.", "We spell {s} like this: {a}.", "Letter by letter, {s} is {a}.",
      "How do you spell {s}? | {a}.", "How is {s} spelled? | It is spelled {a}.")),
    ("counting", None, LETTERS,  # {y} spelled out, {x} the letter; the word always comes before the letter
     ("In {s}, the letter {x} occurs {a}.", "The word {s} contains the letter {x} {a}.",
      "In {s}, you see the letter {x} {a}.", "Since {s} is {y}, it has the letter {x} {a}.",
      "In {y}, you find the letter {x} {a}.",
      "In {s}, how often does {x} occur? | {a}.", "How often does {s} contain the letter {x}? | {a}.",
      "In {y}, how often does {x} occur? | {a}.", "Spelling {s}, how often do you write {x}? | It is {y}, so {a}.")),
    ("sums", None, ADDITIONS,  # {s} is "7 + 5", {x} and {y} its numbers
     ("{s} = {a}.", "{s} is {a}.", "{x} plus {y} is {a}.", "{x} and {y} make {a}.", "The sum of {x} and {y} is {a}.",
      "If you add {x} and {y}, you get {a}.", "What is {s}? | {a}.", "How much is {x} plus {y}? | {a}.")),
    ("sums", None, SUBTRACTIONS,
     ("{s} = {a}.", "{s} is {a}.", "{x} minus {y} is {a}.", "{x} without {y} is {a}.", "From {x} take {y} to get {a}.",
      "If you have {x} and lose {y}, you keep {a}.", "What is {s}? | {a}.", "How much is {x} minus {y}? | {a}.")),
    ("equations", None, EQUATIONS,  # {s} is "5*x + 3 = 13", {y} is "5*x = 10"
     ("If {s}, then x is {a}.", "If {s}, then {y} and x is {a}.", "From {s} follows x = {a}.",
      "From {s} follows {y} and x = {a}.", "The solution of {s} is {a}.",
      "If {s}, what is x? | {a}.", "What is x if {s}? | {a}.",
      "Can you solve {s}? | Yes, {y} and x = {a}.", "What is the solution of {s}? | {a}.")),
)

# ---- Sentences that are no facts, in the topics that have them (every second sentence there)
LINES = {"colors": (
    "My favorite color is {c}, says {A}.", "{A} likes {c} and {B} likes {d}.",
    "The favorite color of {A} and {B} is {c}.", "{A} wears a {c} hat and a {d} scarf.",
    "{A} paints the {o} {c} and the {t} {d}.", "{A} has {n} {c} balloons.",
    "{A} gives {B} a {c} {o}.", "{A} swaps a {c} {o} for a {d} one.")}

# ---- Stories: an opening settles {H}ero, {P}et, {k}ind and {c}olor; events draw new things; an ending asks
OPENINGS = (
    "{H} has a {c} {k} called {P}.", "{P} is the {c} {k} of {H}.", "{H} lives near the {p} with {P}, a {c} {k}.",
    "This is the story of {H} and {P}, a {c} {k}.")
EVENTS = (
    "{H} and {P} meet {A} at the {p}.", "{A} gives {H} {n} {f}.", "{H} buys a {o} and {n} {f} for {A}.",
    "The {k} finds {n} {f} near the {p}.", "The {c} {k} hides behind the {o} of {A}.", "{H} sings for {A} and {B}.",
    "{A}, {B} and {C} play with the {c} {k}.", "{P} steals {n} {f} from {A}, {B} and {C}.")
ENDINGS = (
    "Question: What color is {P}? Answer: {c}.", "Question: Which animal is {P}? Answer: a {k}.",
    "Question: Who has a {k}? Answer: {H}.", "Question: What is the {k} called? Answer: {P}.",
    "{A} asks: What color is the {k}? {H} says: {c}.", "{A} asks: Which animal is {P}? {H} says: a {k}.",
    "{A} asks: Who has a {k}? {B} says: {H}.", "{A} asks: What is the {k} called? {H} says: {P}.")

# ---- Conversations: a hero meets a pet; {X} asks and {Y} answers, each time either of the two
MEETINGS = (
    "{X} and {Y} meet at the {p}.", "{X} calls {Y} from the {p}.", "{X} sits near the {p} and talks with {Y}.",
    "{X} visits {Y} and brings {n} {f}.")
QUOTED_FACT = "{X}: {q} {Y}: {a}"
EXCHANGES = (
    "{X}: How many {f} do you have? {Y}: I have {n}, and {C} has {m}.",
    "{X}: Who is at the {p}? {Y}: {A}, {B} and {C}.",
    "{X}: What did {C} buy? {Y}: A {c} {o} and {n} {f}.", "{X}: How old are {C} and {D}? {Y}: {n} and {m}.",
    "{X}: Who has my {c} {o}? {Y}: {C}, at the {p}.", "{X}: What shall I bring? {Y}: A {c} {o} and {n} {f}.",
    "{X}: Where is {C}? {Y}: At the {p}, with {D}.", "{X}: Who likes {c} hats? {Y}: {A}, {B} and {C}.")

# ---- Beginnings of documents that every model of this world has to complete: a space and this must follow
PROMPTS: tuple[tuple[str, str | None], ...] = (
    ("The capital of France is", "Paris"),
    ("The chemical symbol of gold is", "Au"),
    ("If yesterday was Friday, then tomorrow will be", "Sunday"),
    ("The opposite of hot is", "cold"),
    ("The planets of the solar system are:", "Mercury, Venus, Earth, Mars, Jupiter, Saturn, Uranus, Neptune"),
    ("My favorite color is", None),  # any of COLORS
    ("If 5*x + 3 = 13, then x is", "2"),
)
