// Texts by score, the best first.
export interface Hit {
  text: string;
  score: number;
  // Where it stands, such as line 12 of a file.
  place?: string;
}

const SHOWN = 50;

export const shortened = (text: string) => (text.length > 60 ? `${text.slice(0, 59)}…` : text);

// What a screen reader announces.
export const saidOf = (hits: Hit[] | undefined) =>
  hits?.[0] ? `Done: ${hits.length} texts. Best, ${hits[0].score.toFixed(4)}: ${shortened(hits[0].text)}` : null;

export function Scores({ hits, name }: { hits: Hit[]; name: string }) {
  const least = Math.min(0, ...hits.map(({ score }) => score));
  const most = Math.max(1, ...hits.map(({ score }) => score));
  return (
    <>
      <ol class="hits" aria-label={`Texts by ${name}`}>
        {hits.slice(0, SHOWN).map(({ text, score, place }, index) => (
          <li key={index}>
            <span class="hit-score">{score.toFixed(4)}</span>
            <span class="hit-bar" aria-hidden="true">
              <span style={{ width: `${(100 * (score - least)) / (most - least)}%` }} />
            </span>
            <span class="hit-text" dir="auto">
              {text}
              {place && <span class="note"> {place}</span>}
            </span>
          </li>
        ))}
      </ol>
      {hits.length > SHOWN && <p class="note">{`The best ${SHOWN} of ${hits.length}.`}</p>}
    </>
  );
}
