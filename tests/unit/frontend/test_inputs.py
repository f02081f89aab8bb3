"""Inputs made from a Hugging Face model's config."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autopar.capture import capture
from autopar.errors import CaptureError
from autopar.frontend import inputs_for, load
from autopar.frontend.labels import IGNORED, ignored_places
from tests.helpers.tiny import TINY


def model(name):
    return load(TINY[name], batch=1, seq=1).model


def hugging_face(cls, config, **values):
    import transformers

    with torch.device("meta"):
        return getattr(transformers, cls)(getattr(transformers, config)(**values))


SMALL = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}


@given(batch=st.integers(1, 20), seq=st.integers(1, 9))
def test_no_row_is_ignored_whole_and_rows_differ(batch, seq):
    ignored = ignored_places(batch, seq)
    assert len(ignored) == batch and all(0 <= count < seq for count in ignored)
    assert seq < 3 or batch < 2 or ignored[0] != ignored[1]


@given(seed=st.integers(0, 99))
def test_ids_and_labels_are_in_range(seed):
    args, kwargs = inputs_for(model("hf-gpt2"), batch=4, seq=9, device="cpu", seed=seed)
    assert args == () and list(kwargs) == ["input_ids", "labels"]
    ids, labels = kwargs.values()
    assert ids.shape == labels.shape == (4, 9) and ids.min() >= 0 and ids.max() < 257
    assert (labels == IGNORED).sum(1).tolist() == [1, 2, 3, 0]
    assert labels[labels != IGNORED].min() >= 0 and labels.max() < 257


def test_decoder_ids_are_the_labels_shifted():
    kwargs = inputs_for(model("hf-t5"), batch=4, seq=9, device="cpu")[1]
    assert list(kwargs) == ["input_ids", "labels", "decoder_input_ids"]
    labels, decoder = kwargs["labels"], kwargs["decoder_input_ids"]
    assert (decoder[:, 0] == 0).all() and torch.equal(decoder[:, 1:], labels[:, :-1].clamp(min=0))
    assert list(inputs_for(model("hf-t5"), batch=4, seq=9, labels=False)[1]) == ["input_ids", "decoder_input_ids"]


def test_images():
    pixels, labels = inputs_for(model("hf-vit"), batch=4, seq=9, device="cpu")[1].values()
    assert pixels.shape == (4, 3, 32, 32) and labels.shape == (4,) and labels.max() < 10
    resnet = hugging_face("ResNetForImageClassification", "ResNetConfig", hidden_sizes=[8], depths=[1])
    assert inputs_for(resnet.half(), batch=2, seq=1)[1]["pixel_values"].shape == (2, 3, 224, 224)
    assert inputs_for(resnet, batch=2, seq=1)[1]["pixel_values"].dtype == torch.float16


def test_sound():
    values = {
        "vocab_size": 100,
        "num_mel_bins": 16,
        "encoder_layers": 1,
        "decoder_layers": 1,
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
        "d_model": 32,
        "max_source_positions": 24,
        "max_target_positions": 16,
        "decoder_start_token_id": 1,
        "pad_token_id": 0,
    }
    whisper = hugging_face("WhisperForConditionalGeneration", "WhisperConfig", **values)
    kwargs = inputs_for(whisper, batch=4, seq=9, device="cpu")[1]
    assert list(kwargs) == ["input_features", "labels", "decoder_input_ids", "use_cache"]
    assert kwargs["input_features"].shape == (4, 16, 48) and kwargs["labels"].shape == kwargs[
        "decoder_input_ids"
    ].shape == (4, 9)
    with pytest.raises(CaptureError, match="WhisperForConditionalGeneration has 16 positions, got a sequence of 17"):
        inputs_for(whisper, batch=2, seq=17)


@pytest.mark.parametrize(
    "kind, many, shape", [("regression", 1, (4,)), ("regression", 3, (4, 3)), ("multi_label_classification", 3, (4, 3))]
)
def test_labels_are_of_the_kind_of_problem_that_a_config_says(kind, many, shape):
    """They were numbers of classes, which multi-label losses refuse."""
    values = {**SMALL, "vocab_size": 50, "num_labels": many, "problem_type": kind}
    kwargs = inputs_for(hugging_face("BertForSequenceClassification", "BertConfig", **values), batch=4, seq=9)[1]
    assert kwargs["labels"].shape == shape and kwargs["labels"].dtype == torch.float32
    real = hugging_face("BertForSequenceClassification", "BertConfig", **values).to_empty(device="cpu")
    real.init_weights()
    labels = inputs_for(real, batch=4, seq=9)[1]["labels"]
    assert kind == "regression" or set(labels.unique().tolist()) == {0.0, 1.0}
    assert real(input_ids=torch.ones(4, 9, dtype=torch.long), labels=labels).loss.isfinite()


def test_positions_behind_that_of_padding():
    """Sequences of all the rows of the table were planned, and found no position on ranks."""
    values = {**SMALL, "vocab_size": 50, "max_position_embeddings": 18, "pad_token_id": 1}
    roberta = hugging_face("RobertaForMaskedLM", "RobertaConfig", **values)
    assert inputs_for(roberta, batch=2, seq=16)[1]["input_ids"].shape == (2, 16)
    with pytest.raises(CaptureError, match="RobertaForMaskedLM has 16 positions, got a sequence of 17"):
        inputs_for(roberta, batch=2, seq=17)


def test_positions_of_a_decoder_that_has_its_own_number():
    values = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2}
    values |= {"decoder_attention_heads": 2, "vocab_size": 50, "attention_window": 8}
    values |= {"max_encoder_position_embeddings": 64, "max_decoder_position_embeddings": 16}
    led = hugging_face("LEDForConditionalGeneration", "LEDConfig", **values)
    with pytest.raises(CaptureError, match="LEDForConditionalGeneration has 16 positions, got a sequence of 17"):
        inputs_for(led, batch=2, seq=17)


def test_waves_of_sound_become_as_many_frames_as_there_are_tokens():
    config = {
        **SMALL,
        "conv_dim": (8, 8, 8),
        "conv_kernel": (10, 3, 2),
        "conv_stride": (5, 2, 2),
        "num_feat_extract_layers": 3,
        "num_labels": 7,
    }
    waves = hugging_face("Wav2Vec2ForSequenceClassification", "Wav2Vec2Config", **config)
    sound, labels = inputs_for(waves.eval(), batch=3, seq=6, device="cpu")[1].values()
    assert labels.shape == (3,) and waves.wav2vec2(sound.to("meta")).last_hidden_state.shape == (3, 6, 32)
    spectra = hugging_face("ASTForAudioClassification", "ASTConfig", **SMALL, max_length=64, num_mel_bins=16)
    assert inputs_for(spectra, batch=3, seq=6)[1]["input_values"].shape == (3, 64, 16)
    frames = hugging_face(
        "Wav2Vec2BertForSequenceClassification", "Wav2Vec2BertConfig", **SMALL, feature_projection_input_dim=12
    )
    assert inputs_for(frames, batch=3, seq=6)[1]["input_features"].shape == (3, 6, 12)


def test_videos_and_classes_of_pixels():
    videos = hugging_face(
        "VideoMAEForVideoClassification", "VideoMAEConfig", **SMALL, image_size=32, patch_size=16, num_frames=4
    )
    pixels, labels = inputs_for(videos, batch=3, seq=6)[1].values()
    assert pixels.shape == (3, 4, 3, 32, 32) and labels.shape == (3,)
    scenes = hugging_face(
        "SegformerForSemanticSegmentation", "SegformerConfig", depths=[1] * 4, image_size=64, num_labels=5
    )
    pixels, labels = inputs_for(scenes, batch=3, seq=6, device="cpu")[1].values()
    assert pixels.shape == (3, 3, 64, 64) and labels.shape == (3, 64, 64) and labels.max() == 4


def test_answers_are_places_in_the_text():
    bert = hugging_face("BertForQuestionAnswering", "BertConfig", **SMALL, vocab_size=64)
    kwargs = inputs_for(bert, batch=30, seq=6, device="cpu")[1]
    assert (
        list(kwargs) == ["input_ids", "start_positions", "end_positions"]
        and kwargs["end_positions"].shape == (30,)
        and kwargs["end_positions"].max() == 5
    )


def test_a_decoder_whose_labels_are_classes_reads_any_tokens():
    bart = hugging_face(
        "BartForSequenceClassification",
        "BartConfig",
        vocab_size=64,
        d_model=16,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=16,
        decoder_ffn_dim=16,
        max_position_embeddings=32,
    )
    kwargs = inputs_for(bart, batch=2, seq=4)[1]
    assert kwargs["labels"].shape == (2,) and kwargs["decoder_input_ids"].shape == (2, 4)


def test_texts_that_belong_to_images():
    text, vision = (
        {**SMALL, "vocab_size": 100, "max_position_embeddings": 16},
        {**SMALL, "image_size": 32, "patch_size": 8},
    )
    clip = hugging_face("CLIPModel", "CLIPConfig", text_config=text, vision_config=vision, projection_dim=16)
    kwargs = inputs_for(clip, batch=4, seq=9, device="cpu")[1]
    assert (
        kwargs["input_ids"].shape == (4, 9)
        and kwargs["input_ids"].max() < 100
        and kwargs["pixel_values"].shape == (4, 3, 32, 32)
    )
    assert kwargs["return_loss"] is True and "return_loss" not in inputs_for(clip, batch=4, seq=9, labels=False)[1]


def test_texts_with_images_in_them():
    """As many image tokens as the model makes features of an image: 16 patches."""
    vision = {**SMALL, "image_size": 32, "patch_size": 8, "model_type": "clip_vision_model"}
    llava = hugging_face(
        "LlavaForConditionalGeneration",
        "LlavaConfig",
        text_config={**SMALL, "model_type": "llama", "vocab_size": 100},
        vision_config=vision,
        image_token_index=98,
    )
    kwargs = inputs_for(llava, batch=4, seq=20, device="cpu")[1]
    ids = kwargs["input_ids"]
    assert ids.shape == (4, 20) and kwargs["pixel_values"].shape == (4, 3, 32, 32) and kwargs["use_cache"] is False
    assert ((ids == 98) == torch.tensor([1 <= place < 17 for place in range(20)])).all()
    with pytest.raises(
        CaptureError,
        match="LlavaForConditionalGeneration puts 16 tokens of an image into each text, got a sequence of 17: use one "
        "of at least 18",
    ):
        inputs_for(llava, batch=2, seq=17)
    more = hugging_face(
        "Qwen2VLForConditionalGeneration",
        "Qwen2VLConfig",
        text_config={**SMALL, "num_key_value_heads": 2},
        vision_config={"depth": 1, "embed_dim": 32, "num_heads": 2, "hidden_size": 32},
    )
    with pytest.raises(
        CaptureError,
        match=r"Qwen2VL.* cannot be made: get_image_features does not work on pixels of \(2, 3, 224, 224\) alone .*; "
        r"pass example_inputs",
    ):
        inputs_for(more, batch=2, seq=300)


def test_both_kinds_of_inputs_without_a_sign_how_they_belong_together_are_refused():
    blip = hugging_face(
        "BlipForConditionalGeneration",
        "BlipConfig",
        text_config=SMALL,
        vision_config={**SMALL, "image_size": 32, "patch_size": 8},
    )
    with pytest.raises(
        CaptureError,
        match=r"inputs for BlipForConditionalGeneration cannot be made .*several with return_loss or image tokens",
    ):
        inputs_for(blip, batch=2, seq=4)


def test_labels_follow_the_head():
    classes = hugging_face("BertForSequenceClassification", "BertConfig", **SMALL, num_labels=3)
    assert inputs_for(classes, batch=4, seq=9)[1]["labels"].shape == (4,)
    tokens = hugging_face("BertForTokenClassification", "BertConfig", **SMALL, num_labels=3)
    labels = inputs_for(tokens, batch=4, seq=9, device="cpu")[1]["labels"]
    assert labels.shape == (4, 9) and labels.max() == 2 and labels.min() == IGNORED
    with pytest.raises(CaptureError, match=r"labels for BertModel cannot be made.*ForCausalLM.*loss_fn="):
        inputs_for(hugging_face("BertModel", "BertConfig", **SMALL), batch=4, seq=9)


def test_cache_is_turned_off_for_a_model_that_keeps_one():
    llama = hugging_face("LlamaForCausalLM", "LlamaConfig", **SMALL)
    assert inputs_for(llama, batch=4, seq=9)[1]["use_cache"] is False
    assert llama.config.use_cache is True


def test_device_is_the_models_own_unless_said():
    assert inputs_for(model("hf-gpt2"), batch=2, seq=4)[1]["input_ids"].is_meta
    assert not inputs_for(model("hf-gpt2"), batch=2, seq=4, device="cpu")[1]["input_ids"].is_meta


def test_too_long_a_sequence_is_said():
    with pytest.raises(CaptureError, match="GPT2LMHeadModel has 64 positions, got a sequence of 65"):
        inputs_for(model("hf-gpt2"), batch=2, seq=65)


def test_other_models_are_refused():
    with pytest.raises(CaptureError, match=r"inputs for Linear cannot be made.*pass example_inputs"):
        inputs_for(torch.nn.Linear(2, 2), batch=2, seq=4)
    anything = hugging_face(
        "PerceiverForSequenceClassification", "PerceiverConfig", d_latents=16, num_latents=4, d_model=16, num_blocks=1
    )
    with pytest.raises(
        CaptureError, match=r"inputs for PerceiverForSequenceClassification cannot be made .*its forward takes inputs, "
    ):
        inputs_for(anything, batch=2, seq=4)
    speech = hugging_face("Wav2Vec2ForXVector", "Wav2Vec2Config", **SMALL)
    with pytest.raises(
        CaptureError,
        match=r"labels for Wav2Vec2ForXVector cannot be made: wanted a class named .*ForQuestionAnswering, .* whose "
        r"forward takes labels.*name a factory .*--mode inference",
    ):
        inputs_for(speech, batch=2, seq=4)
    assert list(inputs_for(speech, batch=2, seq=4, labels=False)[1]) == ["input_values"]


def test_transcripts_have_half_as_many_tokens_as_frames_and_no_blanks():
    speech = hugging_face("Wav2Vec2ForCTC", "Wav2Vec2Config", **SMALL, pad_token_id=3)
    labels = inputs_for(speech, batch=2, seq=9, device="cpu")[1]["labels"]
    assert labels.shape == (2, 4) and not (labels == 3).any() and labels.max() < speech.config.vocab_size
    assert inputs_for(speech, batch=2, seq=9, device="meta")[1]["labels"].shape == (2, 4)


def test_a_decoder_without_a_start_token_makes_its_own_inputs_or_says_that_it_cannot():
    mbart = hugging_face(
        "MBartForConditionalGeneration",
        "MBartConfig",
        vocab_size=64,
        d_model=16,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=16,
        decoder_ffn_dim=16,
        max_position_embeddings=32,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    args, kwargs = inputs_for(mbart, batch=2, seq=4, device="cpu")
    assert (
        "labels" in kwargs
        and "decoder_input_ids" not in kwargs
        and capture(mbart, args, kwargs).input_names[:1] == ("input_ids",)
    )
    t5 = model("hf-t5")
    t5.config.decoder_start_token_id = None
    args, kwargs = inputs_for(t5, batch=2, seq=4, device="cpu")
    with pytest.raises(
        CaptureError,
        match=r"(?s)T5ForConditionalGeneration does not run on these inputs: .*"
        r"decoder_start_token_id has to be defined",
    ):
        capture(t5, args, kwargs)


def test_labels_of_heads_that_transformers_lists_are_token_ids():
    marian = hugging_face(
        "MarianMTModel",
        "MarianConfig",
        vocab_size=64,
        d_model=16,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=16,
        decoder_ffn_dim=16,
        max_position_embeddings=32,
        pad_token_id=0,
        decoder_start_token_id=0,
        eos_token_id=1,
    )
    _, kwargs = inputs_for(marian, batch=2, seq=4)
    assert kwargs["labels"].shape == kwargs["decoder_input_ids"].shape == (2, 4)


def test_a_config_without_a_vocabulary_is_said():
    import transformers

    small = transformers.BertConfig(
        vocab_size=64, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    both = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(small, small)
    with pytest.raises(
        CaptureError, match=r"need vocab_size, which the config lacks \(EncoderDecoderConfig, got None\)"
    ):
        inputs_for(transformers.EncoderDecoderModel(both), batch=2, seq=4)


def test_a_decoder_without_a_padding_token_is_said():
    t5 = model("hf-t5")
    t5.config.pad_token_id = None
    with pytest.raises(CaptureError, match="need pad_token_id, which the config lacks"):
        inputs_for(t5, batch=2, seq=4, device="cpu")
