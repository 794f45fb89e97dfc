// Names and values of one thing.
import type { ComponentChildren } from "preact";

export type KeyValue = [name: string, value: ComponentChildren];

export const KeyValues = ({ rows, id }: { rows: (KeyValue | null | false)[]; id?: string }) => (
  <dl class="key-values" id={id}>
    {rows.filter((row) => row !== null && row !== false).map(([name, value]) => (
      <div key={name}>
        <dt>{name}</dt>
        <dd>{value}</dd>
      </div>
    ))}
  </dl>
);
