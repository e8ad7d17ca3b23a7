"""Templates against transformers (golden), and label spans worked out by hand."""

import json

import data_inputs
import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from clusterjax import errors
from clusterjax.data import chat, encoding, layouts, rows

GOLDEN = data_inputs.GOLDEN
CONVERSATIONS = json.loads((GOLDEN / "conversations.json").read_text())
RENDERS = json.loads((GOLDEN / "expected.json").read_text())["renders"]
TEMPLATES = sorted(path.stem for path in (GOLDEN / "templates").glob("*.jinja"))
MODES = ("byte_level", "sentencepiece")
_BYTE_LEVEL = data_inputs.tokenizer()


def _template(name: str, tok) -> chat.ChatTemplate:
    return chat.ChatTemplate(
        (GOLDEN / "templates" / f"{name}.jinja").read_text(), name, tok
    )


def _conversation(*turns: tuple[str, str], **keys) -> layouts.Conversation:
    messages = [{"role": role, "content": content} for role, content in turns]
    return layouts.Conversation(messages, **keys)


def _learnt(rendered: chat.Rendered) -> list[str]:
    return [rendered.text[a:b] for a, b in rendered.spans]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", TEMPLATES)
def test_text_ids_and_marks_equal_the_reference(mode, name):
    tok = data_inputs.tokenizer(mode)
    template = _template(name, tok)
    cases = [r for r in RENDERS if (r["tokenizer"], r["template"]) == (mode, name)]
    assert len(cases) == len(CONVERSATIONS)
    for case in cases:
        conversation = layouts.Conversation(CONVERSATIONS[case["conversation"]])
        rendered = template.render(conversation)
        assert rendered.text == case["text"]
        bare = chat.Rendered(rendered.text, [])
        [encoded] = encoding.encode(tok, [bare], 10_000)
        ids = encoded.tokens.tolist()
        if case["ids"][0] != tok.bos_id and tok.adds_bos:
            assert ids.pop(0) == tok.bos_id
        assert ids == case["ids"]
        if "mask" in case:
            [marked] = encoding.encode(tok, [rendered], 10_000)
            if mode == "byte_level":
                assert marked.label_mask.tolist() == list(map(bool, case["mask"]))
            else:
                # The reference gives a token that begins in the header to the
                # answer; here it is cut.
                assert tok.decode(marked.tokens[marked.label_mask]) == "".join(
                    _learnt(rendered)
                )


# What is learnt, by hand: the answer and its end token, and with `inst` the blank that
# the model must write first.
SPANS = {
    ("chatml_bare", "single"): ["22<|im_end|>"],
    ("chatml_bare", "two_turns"): [
        "[1, 2, 3]<|im_end|>",
        "[3, 2, 1]\n\nThat is descending order.<|im_end|>",
    ],
    ("chatml_bare", "repeated_answer"): ["yes<|im_end|>", "yes<|im_end|>"],
    ("inst", "single"): [" 22 <|im_end|>"],
    ("inst", "repeated_answer"): [" yes <|im_end|>", " yes <|im_end|>"],
    ("speaker", "comma"): [", World!<|im_end|>"],
    ("speaker", "repeated_answer"): ["yes<|im_end|>", "yes<|im_end|>"],
    ("thinking", "single"): ["<think>\n\n</think>\n\n22<|im_end|>"],
    # The template drops the first turn's reasoning: it is no answer to learn.
    ("thinking", "thought"): ["<think>\n4 * 2\n</think>\n\nEight<|im_end|>"],
    ("marks", "two_turns"): [
        "[1, 2, 3]<|im_end|>",
        "[3, 2, 1]\n\nThat is descending order.<|im_end|>",
    ],
}


@pytest.mark.parametrize(("name", "conversation"), SPANS)
def test_spans_by_hand(name, conversation):
    tok = data_inputs.tokenizer()
    rendered = _template(name, tok).render(
        layouts.Conversation(CONVERSATIONS[conversation])
    )
    assert _learnt(rendered) == SPANS[name, conversation]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", [*chat.NAMES, "chatml_bare", "speaker", "marks"])
def test_labels_decode_to_exactly_the_answer(mode, name):
    tok = data_inputs.tokenizer(mode)
    end = "<|im_end|>" if name.startswith("chatml") else tok.eos_token
    template = chat.load(name, tok) if name in chat.NAMES else _template(name, tok)
    single = name in ("magicoder", "alpaca")
    for messages in CONVERSATIONS.values():
        answers = [m["content"] for m in messages if m["role"] == "assistant"]
        if single and len(answers) > 1:
            continue
        rendered = template.render(layouts.Conversation(messages))
        [encoded] = encoding.encode(tok, [rendered], 10_000)
        answers = [a.strip() if name == "marks" else a for a in answers]
        expected = "".join(answer + end for answer in answers)
        assert tok.decode(encoded.tokens[encoded.label_mask]) == expected


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("prompt", "answer"),
    [
        ("Say it: ", "World"),
        ("x", " World"),
        ("Hel", "lo World"),
        ("a\n", "\n\nhello"),
        ("  ", "  42"),
        ("é", "中文🙂"),
        ("The answer is 4", "2.\n"),
    ],
)
def test_letters_that_merge_with_the_prompt(mode, prompt, answer):
    """One tokenisation, masks by characters: the labels are exactly the answer."""
    tok = data_inputs.tokenizer(mode)
    text = prompt + answer + tok.eos_token
    whole = chat.Rendered(text, [(len(prompt), len(text))])
    [encoded] = encoding.encode(tok, [whole], 100)
    labels = tok.decode(encoded.tokens[encoded.label_mask])
    assert labels in (
        answer + tok.eos_token,
        (answer + tok.eos_token).removeprefix(" "),
    )
    everything = tok.decode(encoded.tokens).removeprefix(tok.bos_token)
    assert everything.strip(" ") == text.strip(" ")
    if mode == "byte_level":
        assert labels == answer + tok.eos_token
        assert tok.decode(encoded.tokens[~encoded.label_mask]) == prompt


_PLAIN_TEXT = st.text(
    st.characters(codec="utf-8", exclude_characters="<>\0"), min_size=1, max_size=30
)


@hypothesis.settings(max_examples=300, deadline=None)
@hypothesis.given(st.lists(_PLAIN_TEXT, min_size=2, max_size=6))
def test_any_spans_decode_to_exactly_their_text(parts):
    """Prompts and answers in turn, cut wherever: also inside a token, twice in one."""
    tok = _BYTE_LEVEL
    edges = np.cumsum([0, *map(len, parts)]).tolist()
    spans = list(zip(edges[1::2], edges[2::2]))
    [encoded] = encoding.encode(tok, [chat.Rendered("".join(parts), spans)], 10_000)
    assert tok.decode(encoded.tokens) == "".join(parts)
    assert tok.decode(encoded.tokens[encoded.label_mask]) == "".join(parts[1::2])


@pytest.mark.parametrize("mode", MODES)
def test_a_token_with_several_edges(mode):
    tok = data_inputs.tokenizer(mode)
    spelled = {token.strip("▁Ġ") for token in tok.backend.get_vocab()}
    texts = sorted(text.replace("▁", " ") for text in spelled if len(text) > 2)
    texts = [text for text in texts if text.isascii() and text[:3].isalpha()]
    word = next(text for text in texts if len(tok.encode(text)) == 1)
    spans = [(1, 2)]
    [encoded] = encoding.encode(tok, [chat.Rendered(word, spans)], 100)
    labels = tok.decode(encoded.tokens[encoded.label_mask])
    assert labels == word[1]
    assert tok.decode(encoded.tokens).removeprefix(tok.bos_token).strip() == word


def test_some_case_above_really_merges():
    tok = data_inputs.tokenizer()
    [token] = [i for i in tok.encode("Say it: World") if "World" in tok.decode([i])]
    assert tok.decode([token]) == " World"


def test_one_begin_token_whoever_writes_it():
    tok = data_inputs.tokenizer("sentencepiece")
    assert tok.adds_bos
    for name in ("inst", "plain"):  # with and without a begin token in the template
        template = chat.load(name, tok) if name == "plain" else _template(name, tok)
        rendered = template.render(layouts.Conversation(CONVERSATIONS["single"]))
        [encoded] = encoding.encode(tok, [rendered], 100)
        assert np.flatnonzero(encoded.tokens == tok.bos_id).tolist() == [0]


def test_end_token_stays_a_label_when_it_is_also_the_pad_token():
    tok = data_inputs.tokenizer()
    assert tok.pad_id == tok.eos_id
    rendered = chat.load("plain", tok).render(
        _conversation(("user", "Hi"), ("assistant", "Yo"))
    )
    [encoded] = encoding.encode(tok, [rendered], 100)
    assert encoded.tokens[-1] == tok.eos_id
    assert encoded.label_mask[-1]


def test_prompt_hello_answer_world():
    tok = data_inputs.tokenizer()
    rendered = chat.load("plain", tok).render(
        _conversation(("user", "Hello"), ("assistant", ", World!"))
    )
    [encoded] = encoding.encode(tok, [rendered], 100)
    answer = [*tok.encode(", World!"), tok.eos_id]
    assert encoded.tokens[encoded.label_mask].tolist() == answer
    assert encoded.first_label == len(encoded.tokens) - len(answer)


def test_the_first_token_is_never_a_label():
    tok = data_inputs.tokenizer()
    [encoded] = encoding.encode(tok, [chat.Rendered("Hello", [(0, 5)])], 100)
    assert not encoded.label_mask[0]
    assert encoded.full_labels == len(encoded.tokens) - 1


def test_answers_of_weight_zero_carry_no_label():
    tok = data_inputs.tokenizer()
    messages = CONVERSATIONS["two_turns"]
    for name in ("marks", "chatml_bare"):
        rendered = _template(name, tok).render(
            layouts.Conversation(messages, untrained=frozenset({1}))
        )
        assert len(rendered.spans) == 1
        assert _learnt(rendered)[0].startswith("[3, 2, 1]")


def test_a_turn_that_the_template_leaves_out_is_told():
    tok = data_inputs.tokenizer()
    source = (
        "{% for m in messages %}{% if m.role != 'system' %}"
        "{{ m.role + ': ' + m.content + eos_token }}{% endif %}{% endfor %}"
    )
    template = chat.ChatTemplate(source, "deaf", tok)
    turns = (("system", "Be brief."), ("user", "Hi"), ("assistant", "Yo"))
    with pytest.raises(rows.RowError, match="leaves out turn 0"):
        template.render(_conversation(*turns))
    assert _learnt(template.render(_conversation(*turns[1:]))) == ["Yo<|im_end|>"]


def test_an_answer_that_is_not_written_out_is_told():
    tok = data_inputs.tokenizer()
    template = chat.ChatTemplate("{{ messages[0].content }}", "mute", tok)
    with pytest.raises(rows.RowError, match="does not write the answer"):
        template.render(_conversation(("user", "Hi"), ("assistant", "Yo")))


def test_a_refusal_of_the_template_is_a_reason():
    tok = data_inputs.tokenizer()
    with pytest.raises(rows.RowError, match="Roles must alternate"):
        _template("inst", tok).render(
            _conversation(("assistant", "Hi"), ("user", "Yo"), ("assistant", "Hm"))
        )


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__.os.popen('true') }}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
        "{% include '/etc/hostname' %}",
    ],
)
def test_the_sandbox_holds(source):
    template = chat.ChatTemplate(source, "hostile", data_inputs.tokenizer())
    with pytest.raises(rows.RowError):
        template.text([{"role": "user", "content": "x"}])


def test_the_date_in_a_text_is_always_the_same():
    source = "{{ strftime_now('%d %b %Y') }} {{ messages[0].content }}"
    template = chat.ChatTemplate(source, "dated", data_inputs.tokenizer())
    assert template.text([{"role": "user", "content": "x"}]) == "26 Jul 2024 x"


def test_a_broken_template_names_its_line(tmp_path):
    path = tmp_path / "broken.jinja"
    path.write_text("fine\n{% if %}\n")
    with pytest.raises(errors.DataError, match=r"broken\.jinja, line 2"):
        chat.load(str(path), data_inputs.tokenizer())


def test_an_unknown_template_lists_the_known():
    with pytest.raises(errors.ConfigError, match="chatml, magicoder, alpaca, plain"):
        chat.load("chattml", data_inputs.tokenizer())


def test_alpaca_with_and_without_input():
    tok = data_inputs.tokenizer()
    template = chat.load("alpaca", tok)
    user = {
        "role": "user",
        "content": "Add.\n\n1 2",
        "instruction": "Add.",
        "input": "1 2",
    }
    answer = {"role": "assistant", "content": "3"}
    assert "### Instruction:\nAdd.\n\n### Input:\n1 2\n\n### Response:\n3" in (
        template.render(layouts.Conversation([user, answer])).text
    )
    without = template.render(_conversation(("user", "Add."), ("assistant", "3")))
    assert "### Instruction:\nAdd.\n\n### Response:\n3" in without.text
    assert _learnt(without) == ["3" + tok.eos_token]


def test_tokenizer_survives_saving(tmp_path):
    for mode in MODES:
        tok = data_inputs.tokenizer(mode)
        tok.chat_template = "{{ messages }}"
        tok.save(tmp_path / mode)
        again = type(tok).load(tmp_path / mode)
        text = "<s>Hello, Wörld 🙂 42</s><|im_end|>"
        assert again.encode(text) == tok.encode(text)
        assert again.chat_template == tok.chat_template
        assert (again.bos_id, again.eos_id, again.pad_id, again.adds_bos) == (
            tok.bos_id,
            tok.eos_id,
            tok.pad_id,
            tok.adds_bos,
        )


def test_stored_truncation_and_padding_are_not_applied(tmp_path):
    tok = data_inputs.tokenizer()
    tok.backend.enable_truncation(4)
    tok.backend.enable_padding(length=4)
    stored = type(tok)(tok.backend, tok.settings)
    assert len(stored.encode("Hello World, hello world! The answer is 42.")) > 4
    assert len(stored.encode("Hello")) == 1


@pytest.mark.parametrize(
    ("name", "content", "match"),
    [
        ("tokenizer.json", b"{}", "not a tokenizer"),
        ("tokenizer.json", b"", "not a tokenizer"),
        ("tokenizer_config.json", b"{", "not JSON"),
        ("tokenizer_config.json", b"[]", "not an object"),
        ("tokenizer_config.json", b'{"eos_token": "<none>"}', "eos_token='<none>'"),
    ],
)
def test_broken_tokenizer_files_are_named(tmp_path, name, content, match):
    data_inputs.tokenizer().save(tmp_path)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(errors.DataError, match=match):
        type(data_inputs.tokenizer()).load(tmp_path)
    with pytest.raises(errors.DataError, match=r"tokenizer\.json does not exist"):
        type(data_inputs.tokenizer()).load(tmp_path / "nowhere")
