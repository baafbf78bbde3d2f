"""Images, video and sound as tensors, and ``.pth`` fields: with torch itself."""

from __future__ import annotations

import io

import av
import numpy as np
import PIL.Image
import pytest
import soundfile
import torch

from shardset.decoding.images import IMAGE_SPECS, decode_image
from shardset.decoding.sample_decoder import SampleDecoder
from shardset.webdataset import autodecode


def picture(kind="JPEG", mode="RGB"):
    noise = np.random.default_rng(0).integers(0, 256, (31, 45, 3), np.uint8)
    buffer = io.BytesIO()
    PIL.Image.fromarray(noise).convert(mode).save(buffer, kind)
    return buffer.getvalue()


@pytest.mark.parametrize("payload", [picture(), picture("PNG"), picture(mode="L")], ids=["JPEG", "PNG", "grey JPEG"])
@pytest.mark.parametrize("word", [word for word, spec in IMAGE_SPECS.items() if spec.container == "torch"])
def test_a_tensor_has_the_values_of_the_array_with_the_channels_in_front(word, payload):
    spec = IMAGE_SPECS[word]
    tensor = decode_image(payload, spec)
    array = decode_image(payload, spec._replace(container="numpy"))
    assert tensor.dtype == (torch.float32 if spec.depth == "float" else torch.uint8)
    assert tensor.is_contiguous()
    np.testing.assert_array_equal(tensor.numpy(), array if array.ndim == 2 else array.transpose(2, 0, 1))
    tensor += 0  # writable


def test_video_and_sound_are_tensors():
    film, sound = io.BytesIO(), io.BytesIO()
    with av.open(film, "w", format="mp4") as output:
        stream = output.add_stream("mpeg4", rate=24)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        frame = av.VideoFrame.from_ndarray(np.full((48, 64, 3), 90, np.uint8), format="rgb24")
        for piece in (frame, None):
            output.mux(stream.encode(piece))
    soundfile.write(sound, np.zeros((100, 2)), 8000, format="WAV")
    decoder = SampleDecoder([autodecode.torch_video, autodecode.torch_audio])
    found = decoder({"mp4": film.getvalue(), "wav": sound.getvalue()})
    frames, silence, info = found["mp4"]
    assert (frames.shape, frames.dtype, silence.shape, info) == (
        (1, 48, 64, 3),
        torch.uint8,
        (0, 0),
        {"video_fps": 24.0},
    )
    samples, rate = found["wav"]
    assert (samples.shape, samples.dtype, rate) == ((2, 100), torch.float32, 8000)


def test_saved_tensors_are_read_where_a_function_is_named():
    buffer = io.BytesIO()
    torch.save({"a": torch.arange(3)}, buffer)
    with pytest.raises(autodecode.DecodingError, match=r"wds\.torch_loads"):
        SampleDecoder()({"pth": buffer.getvalue()})
    decoder = SampleDecoder([autodecode.handle_extension("pth", autodecode.torch_loads)])
    assert decoder({"pth": buffer.getvalue()})["pth"]["a"].tolist() == [0, 1, 2]
