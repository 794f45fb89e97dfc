// What a reload or a change of upstreams and models has changed.
import { Note, Table } from "../parts.jsx";

const rowsOf = (changes) => changes.map((change) => [change.path, change.how, change.detail]);

export function Report({ outcome }) {
  if (!outcome) return null;
  if (!outcome.changes.length && !outcome.needs_restart.length) return <Note>Nothing has changed.</Note>;
  const columns = [["setting", "text"], ["change"], ["detail", "text"]];
  return (
    <>
      <Table label="Changes" columns={columns} rows={rowsOf(outcome.changes)} empty="Nothing has changed." />
      {outcome.needs_restart.length > 0 && (
        <>
          <Note>These need a restart:</Note>
          <Table label="Changes that need a restart" columns={columns} rows={rowsOf(outcome.needs_restart)} />
        </>
      )}
    </>
  );
}
