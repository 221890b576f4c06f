"""Where sentences end, in several languages; | marks each end."""
import pytest

from nanochat.data.sentences import sentence_ends


@pytest.mark.parametrize("marked", [
    "It is 3.5 bar.| Good.|", "At 2 p.m. we eat.| Then go!| Really?| Yes|", "Open until 10:30.| Ring in 2026.| Bye.|",
    "Ask Dr. Who, e.g. on Friday, etc. or Ph.D. students.|", 'He said "no!"| Then left (at once).| Bye.|',
    "one. two.|", "Wait ... there.|",
    "Am 14. März ist z. B. Dr. Li da.| Ja!|", "Das kostet ca. 20 Euro bzw. mehr (inkl. Porto).| Die Nr. 5 nicht.|",
    "Er sagte: „Nein!“| Dann ging er.|", "M. Durand habite av. Foch, bât. B.|",
    "La Sra. Gil vive en la pág. 512.| ¿Sí?| No.|",
    "Ул. Ленина, д. 5, тел. 123.| Стоит 500 руб. в месяц и т. д. и т. п.|", "यह है।| ठीक।|",
    "天气好。|我们去！|他说：“好。”|走。|", "3.5公里。|「行く？」|はい|", "", "a|",
])
def test_where_sentences_end(marked):
    text = marked.replace("|", "")
    ends = [len(part) for part in marked.split("|")[:-1]]
    assert sentence_ends(text) == ([sum(ends[: count + 1]) for count in range(len(ends))] or [0])
