// Vectors: requests, cosines, and the heat map.
import { send } from "./api.js";
import { Region } from "./parts.jsx";

export async function embed(model, input, more = {}) {
  const { content, headers } = await send("/v1/embeddings", { body: { model, input, encoding_format: "float", ...more } });
  return {
    vectors: content.data.map((item) => item.embedding),
    tokens: content.usage.total_tokens,
    space: headers.get("x-embedding-fingerprint"),
    truncated: headers.get("x-truncated-inputs"),
  };
}

// Of vectors that have length 1, this is the cosine.
export const product = (left, right) => left.reduce((sum, value, index) => sum + value * right[index], 0);

export function cosine(left, right) {
  const squares = product(left, left) * product(right, right);
  return squares ? product(left, right) / Math.sqrt(squares) : 0;
}

export const meterRange = (scores) => [Math.min(0, ...scores), Math.max(1, ...scores)];

// From pale for a cosine of 0 and below to deep blue for 1.
export function shadeOf(value) {
  const depth = Math.min(1, Math.max(0, value));
  return {
    backgroundColor: `hsl(210 ${40 + 40 * depth}% ${96 - 66 * depth}%)`,
    // At this depth black and white have the same contrast with the background.
    color: depth > 0.75 ? "#ffffff" : "#000000",
  };
}

function CosineCell({ left, right }) {
  if (left.length !== right.length) return <td>{`${left.length} ≠ ${right.length}`}</td>;
  const value = cosine(left, right);
  return <td style={shadeOf(value)}>{value.toFixed(3)}</td>;
}

// rows, columns: vectors; without columns, the rows again. heads: elements or texts of the columns.
export function HeatMap({ caption, names, rows, columns = rows, heads = columns.map((_, index) => String(index + 1)) }) {
  return (
    <Region label={caption}>
      <table class="heat">
        <caption>{caption}</caption>
        <thead>
          <tr>
            <td />
            {heads.map((head) => (
              <th scope="col">{head}</th>
            ))}
          </tr>
        </thead>
        <tbody>
          {rows.map((left, index) => (
            <tr>
              <th scope="row">{`${index + 1}. ${names[index]}`}</th>
              {columns.map((right) => (
                <CosineCell left={left} right={right} />
              ))}
            </tr>
          ))}
        </tbody>
      </table>
    </Region>
  );
}
