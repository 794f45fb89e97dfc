// The least cosine of every two replicas, by their numbers in the table above it.
import { count } from "../../lib/format.ts";
import type { Verification } from "./verify-outcome.tsx";

const cosineText = (cosine: number | null) => (cosine === null ? "–" : cosine.toFixed(5));

export function VerifyMatrix({ report }: { report: Verification }) {
  const pairs = new Map(report.pairs.map((pair) => [`${pair.one}\n${pair.other}`, pair]));
  const pairOf = (one: string, other: string) => pairs.get(`${one}\n${other}`) ?? pairs.get(`${other}\n${one}`);
  const names = report.members.map((member) => member.name);
  const numbers = names.map((_, index) => String(index + 1));
  return (
    <div class="scroll" role="region" aria-label="Least cosine of every two" tabIndex={0}>
      <table class="plain matrix">
        <caption>{`Least cosine of ${count(report.texts)} texts, by the numbers above`}</caption>
        <thead>
          <tr>
            <td />
            {numbers.map((number) => (
              <th scope="col" class="number" key={number}>
                {number}
              </th>
            ))}
          </tr>
        </thead>
        <tbody>
          {names.map((one, row) => (
            <tr key={one}>
              <th scope="row">{numbers[row]}</th>
              {names.map((other, column) => {
                const pair = pairOf(one, other);
                const isWrong = row !== column && pair !== undefined && !pair.fits;
                return (
                  <td key={other} class={`number${isWrong ? " differs" : ""}`}>
                    {row === column ? "1" : cosineText(pair?.cosine ?? null)}
                  </td>
                );
              })}
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}
