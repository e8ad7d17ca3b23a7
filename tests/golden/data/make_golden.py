"""Makes the tokenizers and expected.json with transformers as the reference.

python tests/golden/data/make_golden.py   (needs transformers and tokenizers)
"""

import json
import pathlib

import tokenizers
import transformers
from tokenizers import (
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

HERE = pathlib.Path(__file__).parent
SPECIAL = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
MODES = ("byte_level", "sentencepiece")


def texts() -> list[str]:
    """Text to train on: the conversations and some Python."""
    conversations = json.loads((HERE / "conversations.json").read_text())
    found = [m["content"] for turns in conversations.values() for m in turns]
    found += [pathlib.Path(json.__file__).read_text()] * 2
    found += ["Hello World, hello world! The answer is 42.\n"] * 20
    return found


def byte_level() -> tokenizers.Tokenizer:
    result = tokenizers.Tokenizer(models.BPE())
    result.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    result.decoder = decoders.ByteLevel()
    result.post_processor = processors.ByteLevel(trim_offsets=True)
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    result.train_from_iterator(texts(), trainer)
    return result


def sentencepiece() -> tokenizers.Tokenizer:
    """The form of Llama 1 and 2: no pre-tokenizer, blanks as ▁, bytes as fallback."""
    result = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    bytes_ = [f"<0x{i:02X}>" for i in range(256)]
    result.normalizer = normalizers.Replace(" ", "▁")
    trainer = trainers.BpeTrainer(
        vocab_size=900,
        special_tokens=[*SPECIAL, *bytes_],
        limit_alphabet=90,
        show_progress=False,
    )
    lines = [" " + line for text in texts() for line in text.split("\n")]
    result.train_from_iterator(lines, trainer)
    content = json.loads(result.to_str())
    content["added_tokens"] = content["added_tokens"][: len(SPECIAL)]
    result = tokenizers.Tokenizer.from_str(json.dumps(content))
    result.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    result.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    result.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", result.token_to_id("<s>"))]
    )
    return result


def main() -> None:
    conversations = json.loads((HERE / "conversations.json").read_text())
    expected = {"transformers": transformers.__version__, "renders": []}
    for mode in MODES:
        folder = HERE / mode
        folder.mkdir(exist_ok=True)
        backend = byte_level() if mode == "byte_level" else sentencepiece()
        end = "<|im_end|>" if mode == "byte_level" else "</s>"
        reference = transformers.PreTrainedTokenizerFast(
            tokenizer_object=backend, bos_token="<s>", eos_token=end, pad_token=end
        )
        reference.save_pretrained(folder)
        for path in sorted((HERE / "templates").glob("*.jinja")):
            reference.chat_template = path.read_text()
            for name, turns in conversations.items():
                expected["renders"].append(render(reference, mode, path, name, turns))
    (HERE / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")


def render(reference, mode, path, name, turns) -> dict:
    marks = "{% generation %}" in path.read_text()
    result = {"tokenizer": mode, "template": path.stem, "conversation": name}
    result["text"] = reference.apply_chat_template(turns, tokenize=False)
    out = reference.apply_chat_template(
        turns, tokenize=True, return_dict=True, return_assistant_tokens_mask=marks
    )
    result["ids"] = list(out["input_ids"])
    if marks:
        result["mask"] = list(out["assistant_masks"])
    return result


if __name__ == "__main__":
    main()
