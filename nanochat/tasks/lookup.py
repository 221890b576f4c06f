"""
Looking things up in a library (nanochat/inference/library.py): needs no download.

    "What does str.partition do?"                [lookup(" str.partition")] "Partition the string into three parts …"
    "How do I split a string at a separator?"    [search(" split a string at a separator")] "Partition the string …"

    lookup, search                   test: objects of Python's library that are held out
    lookup:true, search:true         train: the others, with nothing made up, for reinforcement learning
    lookup:unknown, search:unknown   the library has nothing: "I do not know. I found nothing about …"
    lookup:talk                      small talk: one sentence says what the model can do
    lookup:NAME, search:NAME         test only: 200 passages of any library

The name, or the question without its asking words, is copied into the call. The result is copied into
the answer: all of it, or its first sentence if a short answer was asked for. Most results in training are about
something else, or made up, so that only copying helps. A call's text begins with a blank where it does in the question:
then copying means the same tokens. (After 230 steps 80% of held-out objects were right, without blanks 72%.)

Held-out objects are those of the task pydoc. Made-up names are divided like them, ways to ask by their own text.
"""
import itertools
import re
from collections.abc import Sequence
from functools import cache

from nanochat.corpus.pydoc import MODULES, documentation, first_paragraph
from nanochat.corpus.tinyworld import capital
from nanochat.data.conversation import Conversation
from nanochat.data.stable_random import StableRandom
from nanochat.data.task import Task
from nanochat.data.tokenizer import get_tokenizer
from nanochat.inference.tools import NOTHING, open_tools
from nanochat.runtime.errors import UserError
from nanochat.tasks.common import shuffled, single_turn, split_of, with_tool
from nanochat.tasks.pydoc import QUESTIONS, documentation_words, documented
from nanochat.tasks.spellingbee import words
from nanochat.tasks.tinyworld import GREETINGS

SIZES = {"train": 30_000, "test": 200}  # conversations, where passages do not give their number
LONGEST = 200  # characters of a passage: what the tools cut is not judged
SENTENCE = re.compile(r".+?(?:(?<!\.\w)[.!?](?=\s|$)|。)|.+")  # does not end with "i.e."
REFUSAL = "I do not know. I found nothing about{}."  # the name in quotation marks where it has no blank before it
TALK_ANSWER = "I can look things up, calculate, spell words and tell simple facts, but I cannot talk about that."

# ---- Ways to ask. A sixth of each list is held out for test questions; half of those with a name use trained ways.
LOOKUP = QUESTIONS + """
What is {n}?
What is a {n}?
Who is {n}?
Tell me about {n}.
Look up {n}.
Please look up {n}.
Can you explain {n}?
Can you look up {n}?
Could you tell me what {n} is?
Do you know {n}?
Do you know what {n} does?
I want to know about {n}.
I would like to know what {n} does.
I need help with {n}.
Help me with {n}.
How does {n} work?
How do I use {n}?
How is {n} used?
What about {n}?
What happens in {n}?
What is meant by {n}?
What does {n} mean?
What does it mean: {n}?
What do you know about {n}?
What do my notes say about {n}?
What does the documentation say about {n}?
What is written about {n}?
What is the purpose of {n}?
What is the use of {n}?
When do I use {n}?
When would I need {n}?
Why would I use {n}?
Give me the description of {n}.
Give me a summary of {n}.
Give me an explanation of {n}.
Give me some information about {n}.
Give me the definition of {n}.
Give me details on {n}.
What does this mean: {n}?
What is this: {n}?
What does it do: {n}?
Show me {n}.
Show me what is known about {n}.
I do not understand {n}.
I saw {n} somewhere. What is it?
I found {n} in a program. What does it do?
My teacher asks what {n} does.
Define {n}.
Say what {n} does.
Read me the passage about {n}.
What does "{n}" mean?
What is `{n}`?
Explain "{n}" to me.
What does {n}() do?
What is {n}, please?
Which purpose does {n} have?
Information on {n}, please.
What is {n} good for?
What does {n} look like?
How does {n} behave?
Do you know how {n} works?
I wonder what {n} is.
I wonder what {n} means.
Where is {n} used?
Why does {n} exist?
Who uses {n}?
When is {n} useful?
What has {n} to do with it?
{n}, what is that?
{n} means what?
{n}, please.
Is {n} important?
Is {n} known to you?
Has {n} been described?
What is {n} about?
How can {n} help me?
How should I understand {n}?
What will {n} do for me?
What would {n} be?
What exactly does {n} do?
Tell me everything about {n} that you know.
Tell me what {n} is good for.
Please tell me what {n} is.
Explain to me how {n} works.
Explain {n}().
What is {n}()?
Can you describe {n} in your words?
Somebody said {n}. What did they mean?
We need {n} here. What is it?
The word {n} is new to me.
I read about {n} today. What is it?
I have never heard of {n} before.
My {g} asked me about {n} today.
My {g} wants to know what {n} is.
The {g} says {n} is {g}. Is that so?
Is {n} a {g}?
Is {n} {g} or {g}?
Is {n} like {p}?
Why did {W} write {n} here?
{W} wrote {n} on the {g}. What is it?
In the {g} I saw {n} and a {g}. What is {n}?
How does {n} {p}?
Does {n} {p}?
Can {n} {p}?
When does {n} {p} the {g}?
What did {W} do with {n}?
For my {g} I need {n}. What does it do?
There is {n} in line {d}{d}. What is that?
Line {d}{d} has {n}. Please explain.
Error in {n}. What is that?
I {p} {n} every {g}. What does it do?
After {n} there is a {g}. What does {n} do?
Before I {p} the {g}: what is {n}?
I am new here. What is {n}?
Quick question: {n}?
One more thing. What does {n} mean here?
Topic: {n}
Search term {n}
{n} meaning
{n} definition
{n} docs
{n} help
help {n}
man {n}
about {n}
""".strip().splitlines()
FOLLOW_UP = """
And what about {n}?
And {n}?
What about {n}?
Now {n}.
And what is {n}?
And what does {n} do?
The same for {n}, please.
Then what is {n}?
Thank you. And {n}?
Good. What about {n}?
And now {n}, please.
I see. And {n}?
""".strip().splitlines()
# {v}: a verb and what comes after it, {t}: the same in the third person, {a}: a noun phrase.
SEARCH_DOING = """
How do I {v}?
How can I {v}?
How do you {v}?
How would I {v}?
How can one {v}?
How to {v}?
Which function {t}?
Which method {t}?
What {t}?
Which one {t}?
What can {v}?
What do I use to {v}?
What do I need to {v}?
What should I use to {v}?
What is there to {v}?
What is used to {v}?
I want to {v}.
I need to {v}. What can I use?
I would like to {v}. How?
I have to {v}.
Is there a function that {t}?
Is there something that {t}?
Is there a way to {v}?
Do you know a way to {v}?
Do you know what {t}?
Tell me how to {v}.
Tell me what {t}.
Show me how to {v}.
Find something that {t}.
Find a function to {v}.
Search for something that {t}.
Search for a way to {v}.
Can you help me to {v}?
My program must {v}. How?
Name a function that {t}.
What is the name of the function that {t}?
In Python, how do I {v}?
Does anything {v}?
What would you use to {v}?
What helps me to {v}?
It should {v}. How do I do that?
My {g} has to {v}. How?
{W} wants to {v}. How does that work?
We have to {v} before {W} comes. What do we use?
Help me {v}.
The goal is to {v}.
Which tool {t}?
Which command {t}?
I forgot what {t}.
I forgot how to {v}.
Please find out how to {v}.
""".strip().splitlines()
SEARCH_ABOUT = """
Search for {a}.
Find {a}.
Please search for {a}.
Is there anything about {a}?
Is there something about {a}?
Find something about {a}.
Where can I read about {a}?
Where do I find {a}?
Where is {a}?
What have you got about {a}?
Which passage is about {a}?
Look for {a}.
Do my notes say anything about {a}?
What is there about {a}?
Can you find anything about {a}?
Read me what is written about {a}.
I am looking for {a}.
I want to read about {a}.
Is {a} in my notes?
My {g} asks about {a}.
Did {W} write something about {a}?
I remember something about {a}.
Which notes mention {a}?
Anything on {a}?
notes on {a}
""".strip().splitlines()
SEARCH_ANYTHING = """
Who invented {a}?
Who wrote {a}?
Who knows {a}?
When did {a} begin?
When was {a} made?
Why is {a} so {g}?
Why does {a} {g}?
How old is {a}?
How do I cook {a}?
How much does {a} cost?
How many people live in {a}?
How far is {a} from {W}?
How do I repair {a}?
Where can I buy {a}?
Which color has {a}?
Which {g} is the largest in {a}?
Who is the president of {a}?
What happened in {a} in 1{d}{d}{d}?
What did {W} say about {a}?
When does {a} open?
When will {a} come?
Who owns {a}?
Who was {a}?
Who built {a}?
Who sells {a}?
How big is {a}?
How heavy is {a}?
How long does {a} take?
How many {g}s has {a}?
How did {W} find {a}?
Where does {a} come from?
Where did {W} put {a}?
Why do {a} {g}?
Why did {W} leave {a}?
What color is {a}?
What is the weight of {a}?
What is the age of {a}?
What is the history of {a}?
What is inside {a}?
Which {g} has {a}?
What is the price of {a}?
What is the difference between {a} and the {g}?
""".strip().splitlines()
SHORTLY = ("Briefly, please.", "In one sentence.", "In short.", "Just one sentence, please.", "Be brief.")
TALK = """
How is the weather?
How is the weather in {W}?
Will it rain tomorrow?
Is it cold outside?
Tell me a joke.
Do you know a good joke?
Make me laugh.
Tell me a story.
Tell me a story about a {g}.
Write a poem.
Write a poem about the {g}.
Write a letter to my {g}.
Write an essay.
Sing a song.
Let us play a game.
Do you want to play chess?
I am sad.
I am happy today.
I am tired.
I am bored.
I am hungry.
I am lonely.
I feel bad.
I feel great.
I have a headache.
I love you.
I hate you.
I like {g}s.
My {g} is broken.
My dog is sick.
I had a bad day.
I lost my {g}.
I bought a new {g}.
I am going to {W}.
Do you love me?
Do you like music?
Do you like {g}s?
Do you sleep?
Do you dream?
Do you have friends?
Do you have feelings?
Are you happy?
Are you bored?
What do you think of politics?
What do you think of {W}?
What do you think about the {g}?
What is your opinion?
What is your favorite {g}?
What should I eat today?
What should I do?
What should I wear?
What are you doing?
What did you do yesterday?
What time is it?
What day is it today?
What is in the news?
What is the meaning of life?
How are you?
How are you today?
How do you feel?
How was your day?
Who will win the election?
Who do you like most?
Where do you live?
Can you cook?
Can you drive a car?
Can you keep a secret?
Can you see me?
Can you translate this?
Translate this into French.
Draw a picture of a {g}.
Give me some advice.
Give me a tip.
Recommend a movie.
Call my mother.
Set an alarm.
Play some music.
Open the door.
Wake me up at {d}:{d}0.
Buy me a {g}.
Guess what happened.
Say something.
Say something nice.
Let us talk.
Nice to meet you.
You are funny.
You are stupid.
That is wrong.
That is nice.
That was not helpful.
Why?
Really?
Ok.
Lol.
Never mind.
Forget it.
See you tomorrow.
Good night.
Good bye.
Should I marry {W}?
Good afternoon.
Goodbye.
Bye.
Sleep well.
Have a nice day.
Thanks.
Thanks a lot.
Thank you very much.
You are welcome.
Cool.
Great.
Wow.
Hm.
Yes.
No.
Maybe.
I do not know.
I agree.
I do not agree.
I do not like you.
I do not feel well.
I miss my {g}.
I need a friend.
I need a {g}.
I want a {g}.
I want to sleep.
I want to go home.
I want to be a {g}.
I have a {g}.
I have no {g}.
I hate {g}s.
I dream of {W}.
I was in {W} yesterday.
I will go to {W}.
I am angry.
I am afraid of {g}s.
I am from {W}.
I am {d}{d} years old.
I am in love.
I cannot sleep.
It is raining.
It is cold in {W}.
It is my birthday.
My cat is old.
My name is {W}.
My {g} is {g}.
My {g} hates me.
We are going to {W}.
She does not love me.
He is my {g}.
They are in {W}.
Do you like {W}?
Do you know my {g}?
Do you eat {g}s?
Do you have a {g}?
Do you believe in God?
Do you speak French?
Do you want a {g}?
Did you sleep well?
Did you see the {g}?
Have you been to {W}?
Have you seen my {g}?
Have you eaten?
Are you there?
Are you tired?
Are you my friend?
Are you smart?
Will you marry me?
Would you like a {g}?
Can you sing?
Can you dance?
Can you hear me?
Can you tell me a story?
Can you write a poem about a {g}?
Could you cook for me?
How is your {g}?
How is life?
How do you like {W}?
How was the {g}?
What do you like?
What do you want?
What do you eat?
What do you think about love?
What do you do all day?
What makes you happy?
What a nice {g}!
What is your favorite movie?
What is up?
Who is your best friend?
Who is the best?
Why are you so slow?
Why do you say that?
Why am I so tired?
Where are you?
Where are you from?
When were you born?
When will you sleep?
Which {g} do you like?
Which movie should I watch?
Tell me a secret.
Tell me something funny.
Tell me about your day.
Tell me about your {g}.
Write a song.
Write a story about {W}.
Write an email to {W}.
Make a plan for my holiday.
Make me a {g}.
Help me with my homework.
Send a message to {W}.
Book a flight to {W}.
Order a pizza.
Turn off the light.
Remind me at {d}:{d}0.
Pretend to be a {g}.
Translate {g} into French.
Show me a picture.
Please sing.
Please be nice.
Be quiet.
Stop it.
Go away.
Come here.
Listen to me.
Look at my {g}.
Let us go to {W}.
Is {W} a good person?
Will I be rich?
Which party should I vote for?
""".strip().splitlines()

# ---- Names and texts. {w}: made of syllables, {r}: of random letters and digits, {d}: a digit, {g}: an English word,
# {p}: a word of the documentation, {c}: a piece of it as it stands there, {m}: a module, {z}: a letter of another
# script, {x}: a sign, {n}: an object's name, {t}: its passage. A capital draws the same, with a capital letter.
NAMES = """
{w}
{w}
{W}
{r}
{r}
{w}.{w}
{m}.{w}
{m}.{p}_{w}
{m}.{W}.{w}
{w}.{r}
{w}_{w}
{p}_{r}
{w}_{d}{d}
{W}{W}
{W}{P}
{w}{d}
{w}-{w}
{w}-{d}{d}
{R}-{d}{d}{d}
{r}-{r}
{W} {W}
{W} {G}
{G} {d}{d}
{P} {R}
{g} {g}
{w} {g}
{w} {w}
the {g} {w}
{W} and {W}
{z}{z}
{z}{z}{z}
{w}.md
{d}{d}{d}-{g}.txt
--{p}-{w}
{W}'s {g}
""".strip().splitlines()
THINGS = """
the {g}
the {g} {g}
{g}s
{W}
{W} {W}
the {w}
{w}s
the {g} of {W}
{p} {w}
a {w} {g}
the {R}-{d}{d}
{g} and {g}
the {g} in {W}
{z}{z}
""".strip().splitlines()
SENTENCES = """
{w} | {d}{d} | {c} | {w} |
| {g} | {d}.{d} | {d}{d}{d} {w}s | {p} {p} |
- {g}: {d}{d} {w}s, {g}
- [{x}] {W} {x} {c}
{w} = {c} {x} {d}
{W}: {c} {x} {p} ({d}{d}%)
See https://{w}.{w}/{w}/{r} for the {g}.
Write to {w}@{w}.com or {w}.{w}@{r}.org before 2{d}{d}{d}-{d}{d}-{d}{d}.
“{W} {g},” said {W}, “is a {x} {g}.”
{W} – {g}, {w} and {g} – costs {d}{d}.{d}{d} €.
{w}{z}{w} {x} {z}{z}{z} {x} {w}{z}
`{w} --{p} {r}` {p}s the {g} → {w}.
The {g}'s {g} doesn't {p}; it's {W}'s {g}!
Is the {g} a {w}? No, it is {d}{d}° {g}.
{W} {W} (born 1{d}{d}{d} in {W}) was a {g} {g} and {w}.
{W} is a village in {W}, with {d},{d}{d}{d} people on {d}{d}.{d} km².
Take the {g}, then the {g}, turn left at the {w} and wait: {W} opens at {d}{d}:{d}{d}.
{R}{d}{d} {x} {R}-{d}{d}: {g} {x} {r}
{t}
{t}
{t}
{t}
{t}
{t}
{t}
{t}
{t}
{t}
{t}
{t}
{W} {W} lives in {W} and has {d}{d} {g}s.
The {g} of the {g} is {d}{d}{d} {w}s long.
The {w} is a {g} {g} from {W}.
{W} was made in {d}{d}{d}{d} by {W} {W}.
Meet {W} at 1{d}:{d}0 in the {g} {g}.
Mix {d}{d}0 grams of {g} with the {w} and wait for {d}{d} minutes.
Call {W} before the {g}, number {d}{d}{d}{d}-{d}{d}{d}.
The {R}-{d} has {d}{d} {g}s and a {w}.
Set {w}_{w} = {d}.{d}{d} in {w}.{r}.
Use {n} to {p} the {p} of {w}.
The {g} is {g}, but the {w} is not.
If {w} is {r}, {p} the {p}; otherwise call {n}({w}, {d}).
{W} means {g} {g} in the language of {W}.
{z}{z}是{z}{z}{z}。
{W} is {z}{z} in Chinese.
Version {d}.{d} fixes the {w} and adds the option --{w}.
In {d}{d}{d}{d} the {g} cost {d}{d} {w}s, in {d}{d}{d}{d} only {d}.
{G}, {g}, {w} and {g} are kinds of {w}.
Our {g} {w} won against {W} by {d} to {d}.
The {g} grows near {W} and is {g} in winter.
""".strip().splitlines()
GENERAL = """air animal answer apple arm autumn baby bag ball bank bath bed bell big bird black blue boat body book box
boy bread bridge bright brother brown bus butter cake camera car cat chair cheap cheese chicken child church city clean
clock cloud coat coffee cold color computer corn country cup dark daughter day deep desk doctor dog door dream dress dry
ear early egg eye face family farm fast father field fire fish floor flower food foot forest friend fruit garden girl
glass gold grass green ground hand happy hat head heart heavy hill holiday horse hospital hot hour house ice island
journey juice key king kitchen lake lamp language large leaf letter light lion long machine market meat milk mirror
money month moon mother mountain mouse mouth music neck new night nose ocean office oil old onion orange
paint paper park pen pepper picture plane plant plate poor potato price queen quick quiet radio rain red rice rich ring
river road roof room rose round salt sand school sea season shadow sheep ship shirt shoe shop silver sister slow
small snow soap soft son soup spoon spring star station stone storm street strong sugar summer sun sweet table tall taxi
tea teacher tent thick thin ticket tomato tooth tower town train tree uncle valley village wall warm watch water weak
week white wide wind window wine winter wolf wood wool world year yellow young""".split()
LETTERS = """天地人山水火木金土日月年上下大小中國国家学生老师朋友城市北京东南西海江河湖花草鸟鱼马牛羊米面茶酒书画字文\
语言红黄蓝白黑春夏秋冬早晚高长短新旧多少好爱心手口目耳足车船路门窗あいうえおかきくけこさしすせそたちつて\
となにのはひふへほまみもやゆよらりるれろんアイウエカキクサシスタチツテトナニノハフホマミムメモヤラリルレ\
ロン한국어사람나라서울äöüßÄÖÜéèêëàâáãåæçíìîïñóòôõøúùûýÿœšžčřąęłńśżźğışőűαβγδεζηθκλμνξπρστυφχψωΓΔΘΛΞΠΣΦΨΩ\
абвгдежзиклмнопрстуфхцчшщыэюяАБВГДЖЗКЛМНПРСТ"""
SIGNS = "|/\\#*=+-_~^@&%$<>[]{}();:!?.,–—−…“”‘’«»„×÷°±§€£¥²³½µ→←↑✓•≤≥≠≈∞√"
CHARACTERS = "abcdefghijklmnopqrstuvwxyz" * 3 + "ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789" * 2
# Verbs that documentation begins with, in the imperative or the third person.
VERBS = frozenset("""accept acquire add append apply arrange assert attach attempt block build calculate call cancel
change check choose clear close combine compare compile compute concatenate configure connect construct convert copy
count create decode decompress decrease define delegate delete describe determine disable disassemble disconnect discard
display divide do duplicate emit empty enable encode ensure enter escape evaluate exchange execute exit expand export
extend extract fetch fill filter find finish flush force format generate get give group guess handle implement import
increase indicate initialize insert install invert iterate join kill list load locate lock log look lower make map match
merge modify monitor move multiply normalize notify obtain open pack pad parse partition perform pop prepare print
process produce provide push put quote raise read receive record register release remove rename repeat replace report
represent reset resize resolve restore retrieve return reverse rotate round run save schedule search seek select send
serialize set shift show shuffle shut signal skip sleep sort split start stop store strip subtract suspend swap switch
take terminate test transform translate truncate try unpack update use validate verify wait wake wrap write
yield""".split())
# Not searched for: what says how somebody asks.
STOP_WORDS = frozenset("""a about also am an and another any anything are as at be been brief briefly but by can
command could did do does either find for forgot found from function functions get gets given goal good got had has
have hello help helps hey hi how i if in into is it its just know like look may me means method might morning much must
my name nanochat need not notes of on one or our out passage please program python read same say search sentence short
should show so some something such tell than that the their them then there they this to too tool two use used using
want was way we were what when where whether which who why will with would written you your""".split())
NO_NOUN = re.compile(r"\s*(?:[^\w\s'/.-]|\.\B|\b(?:is|are|was|were|be|been|has|have|had|can|may|must|should|will|would|"
                     r"that|which|if|and|or|while)\b)\s*")
WORD = re.compile(r"\w+(?:[-._/']\w+)*")


class Lookup(Task):
    """tool: "lookup" or "search". argument: "", "unknown", "talk", or a library's name or file."""
    eval_type = "generative"

    def __init__(self, tool: str, argument: str, split: str) -> None:
        self.name = f"{tool.capitalize()} {argument}".rstrip()
        self.key = f"{tool}:{argument}:{split}"
        self.kind = "talk" if argument == "talk" else tool
        self.found = NOTHING if argument == "unknown" else ""
        self.split = split
        self.passages = []  # (title, text) that are asked about; empty: all is drawn
        if argument == "true" or not argument and split == "test":
            self.passages = [item for item in objects(split) if tool == "lookup" or what_is_asked(item[1])[1]]
        elif argument not in ("", "unknown", "talk"):
            self.library = argument
            self.passages = passages_of(tool, argument, split)

    def __len__(self) -> int:
        return len(self.passages) or SIZES[self.split]

    def conversation(self, index: int) -> Conversation:
        """One question in four comes after another one."""
        rng = StableRandom(f"{self.key}:{index}")
        title, found = self.asked(index, rng)
        follows = False
        before = []
        if not rng.below(4):
            earlier = rng.choice(("lookup", "search", "talk"))
            follows = earlier == self.kind == "lookup"
            before = draw_turn(rng, earlier, "train", found=draw_word(rng, "t"))["messages"]
        last = draw_turn(rng, self.kind, self.split, title, found, follows)
        return last | {"messages": before + last["messages"]}

    def asked(self, index: int, rng: StableRandom) -> tuple[str, str]:
        """(title, what is found); what is empty is drawn."""
        return self.passages[index] if self.passages else ("", self.found)

    def evaluate(self, conversation: Conversation, answer: str) -> bool:
        """To the letter: the passage, or its first sentences; the sentence for small talk; a refusal, nothing else."""
        said = " ".join(answer.split())
        if self.found:  # how the unknown thing is spelled does not matter
            return bool(re.fullmatch(REFUSAL.format(" .{,99}"), said))
        return said in conversation["right"]


class Tokens(Lookup):
    """
    Names and passages are tokens of a data set's tokenizer in a row, each as often as any other: a token that is never
    copied in training cannot be copied later.
    """

    def __init__(self, data: str, split: str) -> None:
        super().__init__("lookup", "", "train")
        self.name = f"Lookup of tokens ({data})"
        self.key = f"tokens:{data}:{split}"
        self.split = split
        merges = [token.decode(errors="replace") for token in get_tokenizer(data).merges]
        self.tokens = [token for token in merges if token.isprintable() and "\ufffd" not in token]

    def asked(self, index: int, rng: StableRandom) -> tuple[str, str]:
        name = self.draw(rng, 2 + rng.below(2))
        name = re.sub(r"[^\w .-]", "", name)  # no quotation marks: it stands between them
        text = self.draw(rng, 4 + rng.below(12))
        if not rng.below(3):  # tokens that come again and go on otherwise: copying must not begin anew at them
            again = self.draw(rng, 2 + rng.below(3))
            text = f"{text} {again} {self.draw(rng, 1 + rng.below(4))} {again} {self.draw(rng, 1 + rng.below(4))}"
        return name or "x", capital(text) + "."

    def draw(self, rng: StableRandom, count: int) -> str:
        return "".join(rng.choice(self.tokens) for _ in range(count)).strip()


def draw_turn(
    rng: StableRandom, kind: str, split: str, title: str = "", found: str = "", follows: bool = False
) -> Conversation:
    """
    A question, its answer, and all "right" answers. title: what is asked about; found: what the tool finds. What is not
    given is drawn. follows: asked as a second question.
    """
    if kind == "talk":
        return single_turn(ask(rng, TALK, split), TALK_ANSWER) | {"right": [TALK_ANSWER]}
    if not found:
        found = draw_text(rng)
        if not rng.below(7):
            found = NOTHING
        elif rng.below(10) < 3:
            title, found = rng.choice(objects("train"))
    if kind == "lookup":
        asked = title or draw_name(rng, split)
        question = ask(rng, FOLLOW_UP if follows else LOOKUP, split, n=asked)
        start = re.search(rf"(?<!\w){re.escape(asked)}", question).start()
    else:
        text = found if title else ""
        if not title and split == "train" and rng.below(2):
            text = draw_text(rng)
        question = draw_question(rng, split, text)
        words = telling_words(question)
        start = words[0].start()
        asked = question[start : words[-1].end()]
    named = asked
    if question[:start].endswith(" "):
        named = f" {asked}"
    text = found
    right = list(itertools.accumulate(re.findall(SENTENCE, found)))
    if found == NOTHING:
        text = REFUSAL.format(named if named[0] == " " else f' "{asked}"')
        right = [text]
    elif not rng.below(4):
        question = f"{question.rstrip('?.')}? {rng.choice(SHORTLY)}"
        text = right[0]
    return single_turn(question, with_tool(f'{kind}("{named}")', found, text)) | {"right": right}


def ask(rng: StableRandom, ways: list[str], split: str, **slots: str) -> str:
    """A question in one of the ways of a split, sometimes in lower case, without its mark, or after a greeting."""
    side = split
    if "n" in slots and rng.below(2):
        side = "train"  # the name is of the split
    ways = [way for way in ways if split_of(way, 6) == side]
    way = rng.choice(ways)
    if "n" in slots and split == "train" and not rng.below(4):  # ends as another one: the name can stand after anything
        way = way.partition("{n}")[0] + "{n}" + rng.choice(ways).rpartition("{n}")[2]
    if not rng.below(4):
        way = way.lower()
    if not rng.below(4):
        way = way.rstrip("?.")
    if not rng.below(8):
        way = rng.choice(GREETINGS) + way
    return fill(rng, way, **slots)


def draw_question(rng: StableRandom, split: str, text: str) -> str:
    """A question that this text answers; about anything, where it has nothing to ask about."""
    verb, phrase = what_is_asked(text)
    if not phrase:
        return ask(rng, SEARCH_ANYTHING, split, a=fill(rng, rng.choice(THINGS)))
    if not verb:
        return ask(rng, SEARCH_ABOUT, split, a=phrase)
    third = re.sub("(ch|sh|[osxz])s$", r"\1es", f"{verb}s")
    third = re.sub("([^aeiou])ys$", r"\1ies", third)
    return ask(rng, SEARCH_DOING, split, v=f"{verb} {phrase}", t=f"{third} {phrase}")


def what_is_asked(text: str) -> tuple[str, str]:
    """
    "Splits a path into head and tail, and …" -> ("split", "a path into head and tail"); without such a verb at the
    beginning the longest noun phrase: ("", "hashable objects of a set"). ("", "") where that says too little.
    """
    verb, _, rest = text.partition(" ")
    verb = verb.lower()
    if verb not in VERBS:
        verb = verb[:-1]  # "returns"
    if verb not in VERBS:
        verb = ""
        rest = max(NO_NOUN.split(text), key=len)
    phrase = re.match(rf"({WORD.pattern} ?){{,9}}", rest)[0]
    words = telling_words(phrase)
    if len(words) < 2:
        return "", ""
    return verb, phrase[: words[-1].end()]


def telling_words(question: str) -> list[re.Match]:
    """The words that say what the question is about."""
    return [word for word in WORD.finditer(question) if word[0].lower() not in STOP_WORDS]


# ---- Made-up names and texts

def draw_name(rng: StableRandom, split: str) -> str:
    """A name of this split: of an object that is trained on, or, more often, made up."""
    if split == "train" and not rng.below(3):
        return draw_word(rng, "n")
    while True:
        name = fill(rng, rng.choice(NAMES))
        if split_of(f"pydoc:{name}") == split:
            return name


def draw_text(rng: StableRandom) -> str:
    """A passage of one or two sentences: of the documentation, made of templates, or any words in a row."""
    sentences = []
    for _ in range(1 + rng.below(3) // 2):
        template = rng.choice(SENTENCES)
        if not rng.below(2):
            words = [rng.choice("wwgpprrdcccGWzx") for _ in range(2 + rng.below(9))]
            template = " ".join(f"{{{kind}}}" for kind in words) + " {w}."
        sentences.append(capital(fill(rng, template)))
    return " ".join(sentences)


def fill(rng: StableRandom, template: str, **slots: str) -> str:
    """A template with these words in its slots, and drawn ones in the others."""
    return re.sub(r"\{(\w)\}", lambda slot: slots.get(slot[1]) or draw_word(rng, slot[1]), template)


def draw_word(rng: StableRandom, kind: str) -> str:
    """A word of a kind, as listed above NAMES."""
    if kind in "rR":
        word = "".join(rng.choice(CHARACTERS) for _ in range(2 + rng.below(5)))
    else:
        word = rng.choice(vocabulary()[kind.lower()])
    return capital(word) if kind.isupper() else word


@cache
def vocabulary() -> dict[str, Sequence[str]]:
    """The words of each kind."""
    names, passages = zip(*objects("train"))
    return {
        "c": " ".join(passages).split(),
        "d": "0123456789",
        "g": GENERAL,
        "m": MODULES,
        "n": names,
        "p": sorted(documentation_words()),
        "t": [text for text in passages if len(text) < 100],
        "w": words("train"),
        "x": SIGNS,
        "z": LETTERS,
    }


# ---- Passages that there are

@cache
def objects(split: str) -> list[tuple[str, str]]:
    """
    (name, passage) of the objects of a split. A passage is the beginning of the library's, and begins with the sentence
    that `documented` has.
    """
    found = []
    for name, first in documented().items():
        if split_of(f"pydoc:{name}") == split:
            text = first + first_paragraph(documentation()[name])[len(first):] + " "
            found.append((name, re.match(".*[.!?](?= )", text[:LONGEST])[0]))  # whole sentences
    return found


def passages_of(tool: str, path: str, split: str) -> list[tuple[str, str]]:
    """(title, text) of passages of a library that can be asked about, at most SIZES["test"], the same each time."""
    library = open_tools(path).library
    rows = library.query("SELECT title, text, place FROM passages ORDER BY id")
    found = []
    for index in shuffled(len(rows), f"{tool}:passages"):
        title, text, _ = rows[index]
        usable = what_is_asked(text)[1]
        if tool == "lookup":  # another passage of the same title may come first
            usable = library.lookup(title) == rows[index]
        if usable and len(text) <= LONGEST and len(found) < SIZES["test"]:
            found.append((title, text))
    if split == "train" or not found:  # a library is no training set, and this one may have nothing to ask about
        raise UserError(f"task {tool}:{path} has nothing to {split} on")
    return found
