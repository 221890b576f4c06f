"""Where sentences end: for passages found, quotations, and tasks' questions."""
import re

# A mark that may end a sentence, with any closing quotation marks or brackets after it.
MARK = re.compile(r"""[.!?؟।]["”’“»')\]]*(?=\s) | [。！？]["”’」』）]*""", re.VERBOSE)
# "14. März", "z. B.", "p.m.", "Ph.D.": a short number, or letters and short words with periods.
NO_END = re.compile(r"\d\d?|(?:\w{1,3}\.)*[^\W\d]")
# Code at the end of a passage: it belongs to the sentence before it.
CODE = "\n```\n"
# English, German, French, Spanish and Russian.
ABBREVIATIONS = frozenset("""
al approx ca cf dept dr est etc ext fig incl jr max mr mrs ms no nos prof resp sr st tel temp vol vs
abs bd bzw evtl gem ggf hr inkl jh max min mind nr str tägl usw vgl zzgl
adr av bât boul bur chap env éd mme rdv réf
aprox avda cap dpto núm pág sra srta ud uds
гл г-н г-жа им напр обл просп руб см стр тел тыс ул млн
""".split())


def sentence_ends(text: str) -> list[int]:
    """
    Where the sentences of a text end; the last end is the text's. No sentence ends after a short number or an
    abbreviation, or before a small letter: if that is wrong, a sentence only becomes longer.
    """
    ends = []
    prose, code, _ = text.partition(CODE)
    for mark in MARK.finditer(prose):
        at = mark.start()
        if code and mark.end() == len(prose):
            continue
        word = re.split(r"[\s(\[\"'„“«]", text[max(0, at - 9) : at])[-1]
        is_short = mark[0][0] == "." and (word.lower() in ABBREVIATIONS or NO_END.fullmatch(word))
        if not is_short and not text[mark.end() + 1 : mark.end() + 2].islower():
            ends.append(mark.end())
    return ends if ends[-1:] == [len(text)] else [*ends, len(text)]
