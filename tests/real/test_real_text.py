"""Real tokenizers and chat templates: tokens are those of the `tokenizers` library and of Jinja itself."""

import json
from datetime import datetime
from pathlib import Path

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment
from small_parts import MODEL, TOKENIZERS
from tokenizers import Tokenizer

from pat_jax.rl.text.tokenizer import HuggingFaceTokenizer

pytestmark = pytest.mark.real
ROOT = Path(__file__).parents[2]
PIECES = (
    "Grüße aus Köln! ",
    "你好，世界。",
    "👩‍👩‍👧‍👦 ",
    "\t\tx = [i ** 2 for i in range(10)]\n",
    "¿Cuántos años tienes?\n\n",
    "3.14159265358979 ",
    "мир ",
    "<b>not special</b>",
    "  two  spaces  ",
    r"\frac{1}{2} \le \sqrt{2}",
    "नमस्ते ",
    "don't ",
    "\u00a0\u200b",
    "e\u0301 ",
)


def texts() -> list[str]:
    """200 texts: paragraphs of this project's own pages and code, and mixtures of scripts."""
    files = [*sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "rl").glob("*.py"))]
    pages = (file.read_text("utf-8").split("\n\n") for file in files)
    found = [one for page in pages for one in page if one.strip()][:150]
    mixed = ["".join(PIECES[(i * k) % len(PIECES)] for k in range(1, 5)) for i in range(50)]
    return found + mixed


def reference_template(directory: Path) -> str:
    file = directory / "chat_template.jinja"
    if file.exists():
        return file.read_text("utf-8")
    return json.loads((directory / "tokenizer_config.json").read_text("utf-8"))["chat_template"]


@pytest.mark.parametrize("text_part", [MODEL, *TOKENIZERS], indirect=True)
def test_texts_are_encoded_as_the_library_encodes_them_and_come_back(text_part):
    ours = HuggingFaceTokenizer(text_part)
    library = Tokenizer.from_file(str(text_part / "tokenizer.json"))
    assert len(texts()) == 200
    for text in texts():
        tokens = ours.encode(text)
        assert tokens == library.encode(text, add_special_tokens=False).ids
        assert ours.decode(tokens) == library.decode(tokens)


@pytest.mark.parametrize("text_part", [MODEL, *TOKENIZERS], indirect=True)
def test_chats_are_rendered_as_jinja_renders_them(text_part):
    ours = HuggingFaceTokenizer(text_part)
    library = Tokenizer.from_file(str(text_part / "tokenizer.json"))
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    template = environment.from_string(reference_template(text_part))
    config = json.loads((text_part / "tokenizer_config.json").read_text("utf-8"))
    bos = config.get("bos_token") or ""
    for i, text in enumerate(texts()):
        chat = [{"role": "user", "content": text.strip()}]
        if i % 3 == 0:
            chat = [{"role": "system", "content": "Be brief."}, *chat]
        if i % 5 == 0:
            answer, question = {"role": "assistant", "content": "Yes."}, "And then?"
            chat += [answer, {"role": "user", "content": question}]
        bos_text = bos if isinstance(bos, str) else bos["content"]
        rendered = template.render(messages=chat, add_generation_prompt=True, bos_token=bos_text)
        assert ours.encode_prompt(chat) == library.encode(rendered, add_special_tokens=False).ids
