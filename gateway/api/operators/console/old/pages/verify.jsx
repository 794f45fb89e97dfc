// Comparison of the vectors of an upstream's replicas, as by `gateway verify`.
import { useState } from "preact/hooks";
import { send } from "../api.js";
import { count, NONE } from "../format.js";
import { useAction } from "../hooks.js";
import { Answer, Note, Region, Select, State, Table } from "../parts.jsx";

const cosineText = (cosine) => (cosine === null || cosine === undefined ? NONE : cosine.toFixed(5));

function Members({ report }) {
  return (
    <Table
      id="verify-members"
      label="Compared replicas"
      columns={[
        ["#", "number"],
        ["replica", "text"],
        ["model", "text"],
        ["dtype"],
        ["width", "number"],
        ["lengths", "number"],
        ["tokens", "number"],
        ["fingerprint"],
        ["cosine with the stored one", "number"],
        ["outcome"],
      ]}
      rows={report.members.map((member, index) => [
        String(index + 1),
        member.name,
        member.model_id,
        member.dtype ?? NONE,
        count(member.dimensions),
        `${member.least_norm.toFixed(3)}–${member.greatest_norm.toFixed(3)}`,
        count(member.tokens),
        member.fingerprint,
        cosineText(member.stored?.cosine),
        <State value={member.stored === null ? "not stored" : member.stored.fits ? "fits" : "differs"} />,
      ])}
    />
  );
}

// The least cosine of every two replicas, by their numbers in the table.
function Matrix({ report }) {
  const pairs = new Map(report.pairs.map((pair) => [`${pair.one}\n${pair.other}`, pair]));
  const pairOf = (one, other) => pairs.get(`${one}\n${other}`) ?? pairs.get(`${other}\n${one}`);
  const names = report.members.map((member) => member.name);
  return (
    <Region label="Least cosine of every two">
      <table class="matrix">
        <caption>{`Least cosine of ${count(report.texts)} texts, by the numbers above`}</caption>
        <thead>
          <tr>
            <td />
            {names.map((_, index) => (
              <th scope="col" class="number">
                {String(index + 1)}
              </th>
            ))}
          </tr>
        </thead>
        <tbody>
          {names.map((one, row) => (
            <tr>
              <th scope="row">{String(row + 1)}</th>
              {names.map((other, column) => (
                <td class={`number ${row !== column && !pairOf(one, other).fits ? "differs" : ""}`}>
                  {row === column ? "1" : cosineText(pairOf(one, other).cosine)}
                </td>
              ))}
            </tr>
          ))}
        </tbody>
      </table>
    </Region>
  );
}

const differs = ({ members, pairs }) => members.some(({ stored }) => stored && !stored.fits) || pairs.some(({ fits }) => !fits);

// Replicas that are away are no difference, and no agreement.
function summaryOf(report) {
  if (report.agrees) return "The vectors agree.";
  const away = report.unread.length;
  const left = away ? `${count(away)} ${away === 1 ? "replica" : "replicas"} could not be compared.` : "";
  return differs(report) ? `There are differences. ${left}`.trim() : left;
}

const tone = (report) => (report.agrees ? "good-news" : differs(report) ? "problem troubles" : "note troubles");

function Outcome({ report }) {
  return (
    <>
      <ul id="verify-findings" class={tone(report)}>
        {report.unread.length > 0 && <li>{summaryOf(report)}</li>}
        {[...report.findings, ...report.unread].map((line) => (
          <li>{line}</li>
        ))}
        {!report.findings.length && !report.unread.length && <li>This upstream embeds nothing.</li>}
      </ul>
      {report.members.length > 0 && <Members report={report} />}
      {report.pairs.length > 0 && <Matrix report={report} />}
    </>
  );
}

export function Verify({ upstreams }) {
  const [chosen, setChosen] = useState("");
  const value = upstreams.includes(chosen) ? chosen : (upstreams[0] ?? "");
  const action = useAction(async () => (await send("/admin/replicas/verify", { body: { upstreams: [value] } })).content);
  if (!upstreams.length) return null;
  const said = action.outcome && `Done. ${summaryOf(action.outcome)}`;
  return (
    <>
      <h3>Compare vectors</h3>
      <Note>Each replica embeds six fixed texts; equal replicas return equal vectors. Nothing of a request is used.</Note>
      <form class="row" onSubmit={action.run} id="verify-form">
        <Select label="Upstream to compare" id="verify-upstream" value={value} onChange={setChosen} options={upstreams} />
        <button disabled={action.busy}>Verify</button>
      </form>
      <Answer id="verify-answer" action={action} said={said}>
        {action.outcome && <Outcome report={action.outcome} />}
      </Answer>
    </>
  );
}
