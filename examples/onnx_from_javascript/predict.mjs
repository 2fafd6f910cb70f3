// Ask an exported model about pictures, without Python:  node predict.mjs v2.onnx photo.jpg …
import { readFile } from "node:fs/promises";
import * as ort from "onnxruntime-node";
import sharp from "sharp";

// The file says what it needs: metadata_props is field 14 of an ONNX file, pairs of a key (1) and a value (2), JSON here.
// onnxruntime for JavaScript does not hand it out, so these few lines read it; all other fields are stepped over.
function* fields(bytes) {
  let at = 0;
  const varint = () => {
    let value = 0;
    for (let scale = 1; ; scale *= 128) {
      const byte = bytes[at++];
      value += (byte & 127) * scale;
      if (byte < 128) return value;
    }
  };
  while (at < bytes.length) {
    const key = varint();
    if (key % 8 === 0) varint();
    else if (key % 8 === 2) {
      const length = varint();
      yield [Math.floor(key / 8), bytes.subarray(at, at + length)];
      at += length;
    } else at += key % 8 === 1 ? 8 : 4;
  }
}

function metadata(bytes) {
  const found = {};
  for (const [field, entry] of fields(bytes)) {
    if (field !== 14) continue;
    const [key, value] = [...fields(entry)].map(([, text]) => Buffer.from(text).toString("utf8"));
    found[key] = JSON.parse(value);
  }
  return found;
}

// Half a pixel goes to the even neighbour, as in Python.
const evenly = (value) => (value % 1 ? 2 * Math.round(value / 2) : value);

// The steps that metadata describes: resize the shorter side, cut out the middle, normalise, channel by channel.
async function prepare(path, { size, channels, mean, std, crop, interpolation }) {
  const colours = channels === 1 ? "b-w" : "srgb";
  const upright = await sharp(path)
    .rotate()
    .flatten({ background: "white" })
    .toColourspace(colours)
    .raw()
    .toBuffer({ resolveWithObject: true });
  const { width, height } = upright.info;
  const target = Math.floor(size / crop);
  const sides = [width, height].map((side) => Math.floor((side * target) / Math.min(width, height)));
  const [left, top] = sides.map((side) => evenly((side - size) / 2));
  const pixels = await sharp(upright.data, { raw: { width, height, channels } })
    .resize(sides[0], sides[1], { fit: "fill", kernel: interpolation === "bicubic" ? "cubic" : "linear" })
    .extract({ left, top, width: size, height: size })
    .toColourspace(colours)
    .raw()
    .toBuffer();
  const image = new Float32Array(channels * size * size);
  for (let c = 0; c < channels; c++)
    for (let i = 0; i < size * size; i++)
      image[c * size * size + i] = (pixels[i * channels + c] / 255 - mean[c]) / std[c];
  return image;
}

const [model, ...pictures] = process.argv.slice(2);
if (!pictures.length) {
  console.error("node predict.mjs v2.onnx photo.jpg …");
  process.exit(2);
}
const bytes = await readFile(model);
const { classes, preprocessing } = metadata(bytes);
const session = await ort.InferenceSession.create(bytes);
const { size, channels } = preprocessing;
for (const picture of pictures) {
  const images = new ort.Tensor("float32", await prepare(picture, preprocessing), [1, channels, size, size]);
  const { probabilities } = await session.run({ images });
  const best = [...probabilities.data.keys()].sort((a, b) => probabilities.data[b] - probabilities.data[a]).slice(0, 3);
  console.log(`${picture}: ${best.map((c) => `${classes[c]} ${(100 * probabilities.data[c]).toFixed(1)}%`).join(", ")}`);
}
