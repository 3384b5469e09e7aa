r"""Finds the final answer of a response, in one of the forms that models are asked for.

The first of these forms that a response has counts:

    \boxed{x}   \boxed x   \fbox{x}   \framebox{x}
    <answer>x</answer>
    #### x                               the rest of the line, as in GSM8K
    Answer: x   The answer is x          the rest of the line, or the next line; in the words of
    ### Answer                           many languages, or as a heading
    $x$   $$x$$   \(x\)   \[x\]          as the whole last line

If a form occurs several times, the last one counts. Thoughts (`<think>…</think>`) never count, nor
does text that only repeats the prompt. A chat template may have opened the thought at the end of
the prompt. Each text is read once, whatever it holds. Knows text, not its value (`math_value.py`).
"""

import re
from collections.abc import Iterator

_BOX = re.compile(r"\\(?:boxed|fbox|framebox)(?![a-zA-Z])\s*(?P<content>\{|[^\s{}$\\,.;]*)")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # escaped braces, signs of a set, are skipped
_BETWEEN_BOXES = re.compile(r"(?:[\s$,;.]|\\[()\[\]]|\\text\{|\}|\band\b|\bor\b)*")
_ANSWER = re.compile(
    r"(?<![^\W_])answer(?![^\W_])[^\n.:：=]{0,60}?(?:\bis\b|[:：=])[\s*:：}]*", re.IGNORECASE
)
_WORDS = (
    r"(?<![^\W_])(?:antwort|antwoord|respuesta|resposta|risposta|réponse|răspuns|svar|cevap"
    r"|odpowiedź|odpověď|ответ|відповідь|απάντηση|jawaban|đáp (?:án|số)|الجواب|الإجابة|תשובה|پاسخ"
    r"|उत्तर|คำตอบ)(?: finale?)?|(?:最[終终後后])?答案|答え|解答|答|정답|답"
)
_SENTENCES = (
    r"antwort (?:ist|lautet)|antwoord is|respuesta(?: final)? es|resposta(?: final)? é"
    r"|risposta(?: finale)? è|réponse(?: finale)? est|răspunsul este|svaret (?:är|er)"
    r"|đáp (?:án|số) là|jawaban(?:nya)? adalah|odpowiedź to|odpověď je"
)
_IN_OTHER_WORDS = re.compile(  # followed by a value: a word may deny it
    rf"(?:(?:{_WORDS})[ *_]*[:：]|(?<![^\W_])(?:{_SENTENCES})(?![^\W_])|答案[是为為]|(?:答え|解答)は|답은)"
    r"[\s*:：}]*(?=\d|[^\w\s]|[a-zA-Z](?![^\W_]))",
    re.IGNORECASE,
)
_HEADING = re.compile(  # the line, and what may stand before the answer
    rf"^[ \t]*(?:#+ *)?[*_]*(?:(?:the|your|final|correct) )*(?:answer|{_WORDS})[ \t*_#:：]*$"
    r"(?:\s|\*\*|```\w*|\\\[|\$\$|[->] )*",
    re.IGNORECASE | re.MULTILINE,
)
_TITLE = re.compile(r"\s*[^\W\d_]{3,}")
_END_OF_SENTENCE = re.compile(r"[.!]\**\s+(?=[A-Z(])|。|です(?!か)|입니다|[，,]\s*因")
_MATH = [
    (re.compile(r"(?<!\\)\$\$"), "$$"),
    (re.compile(r"(?<!\\)\$"), "$"),
    (re.compile(r"\\\("), r"\)"),
    (re.compile(r"\\\["), r"\]"),
]
_COPY_LENGTH = 40  # characters of a copy; shorter texts may equal an example's answer by chance


def opens_thought(prompt: str) -> bool:
    """Whether a response to this text begins inside a thought."""
    return prompt.rstrip().endswith("<think>")


def final_answer(response: str, prompt: str = "", *, is_thinking: bool = False) -> str | None:
    r"""Returns the response's final answer, or None if it gives none.

    Args:
      is_thinking: whether the response begins inside a thought that a chat template has opened. A
        prompt that ends in `<think>` opens a thought, too.

    Adjacent boxes are one answer: `\boxed{2} and \boxed{3}` is `2, 3`.

    >>> final_answer(r"First \boxed{3}, but then $\boxed{\frac{1}{2}}$.")
    '\\frac{1}{2}'
    >>> final_answer("so 7 clips")
    """
    _, is_closed, text = response.rpartition("</think>")
    if not is_closed and (is_thinking or opens_thought(prompt)):
        return None
    text = text.partition("<think>")[0].strip()
    if text in prompt and (len(text) >= _COPY_LENGTH or text == prompt.strip()):
        return None
    for find in (last_box, _tagged, _after_hashes, _after_answer):
        if found := find(text):
            return last_box(found) or _after_answer(found) or found.strip()
    found = _last_line_of_math(text)
    if found:
        return found if found not in prompt else None
    return _after(_HEADING, text)


def last_box(text: str) -> str | None:
    r"""Returns the contents of the last complete `\boxed{…}` and of boxes directly before it."""
    boxes = list(_boxes(text))
    if not boxes:
        return None
    start, _, content = boxes.pop()
    while boxes and _BETWEEN_BOXES.fullmatch(text, boxes[-1][1], start):
        start, _, before = boxes.pop()
        content = content if before == content else f"{before}, {content}"
    return content


def _boxes(text: str) -> Iterator[tuple[int, int, str]]:
    """Yields start, end and content of each box, in order; unclosed boxes do not count."""
    closing = _closing_braces(text)
    for box in _BOX.finditer(text):
        first = box.start("content")
        if box["content"] != "{":
            if box["content"]:
                yield box.start(), box.end(), box["content"]
        elif first in closing:
            yield box.start(), closing[first] + 1, text[first + 1 : closing[first]]


def _closing_braces(text: str) -> dict[int, int]:
    opened = []
    closing = {}
    for brace in _BRACE.finditer(text):
        if brace[0] == "{":
            opened.append(brace.start())
        elif brace[0] == "}" and opened:
            closing[opened.pop()] = brace.start()
    return closing


def _tagged(text: str) -> str | None:
    before, is_closed, _ = text.rpartition("</answer>")
    _, is_opened, content = before.rpartition("<answer>")
    return content if is_closed and is_opened else None


def _after_hashes(text: str) -> str | None:
    _, is_there, after = text.rpartition("####")
    is_title = _TITLE.match(after) and (_after_answer(after) or _after(_HEADING, after))
    return after.partition("\n")[0] if is_there and not is_title else None


def _after_answer(text: str) -> str | None:
    return _after(_ANSWER, text) or _after(_IN_OTHER_WORDS, text)


def _after(form: re.Pattern[str], text: str) -> str | None:
    found = list(form.finditer(text))
    if not found:
        return None
    return _END_OF_SENTENCE.split(text[found[-1].end() :].partition("\n")[0])[0] or None


def _last_line_of_math(text: str) -> str | None:
    text = text.rstrip().removesuffix(".")
    for opening, closing in _MATH:
        if not text.endswith(closing):
            continue
        starts = list(opening.finditer(text, 0, len(text) - len(closing)))
        if not starts or text[: starts[-1].start()].rpartition("\n")[2].strip():
            return None
        return text[starts[-1].end() : -len(closing)].strip()
    return None
