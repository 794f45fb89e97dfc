// A form of the playground with its answer: fields on the left, what came of them on the right, and the code below.
import type { ComponentChildren } from "preact";
import { Play } from "lucide";
import type { Action } from "../../lib/load.ts";
import { Button } from "../../ui/button.tsx";
import { Card, Grid } from "../../ui/card.tsx";
import { Code } from "../../ui/code.tsx";
import { Empty, Problem, Skeleton } from "../../ui/states.tsx";

export interface TryFormProps {
  id: string;
  title: string;
  note?: string;
  verb: string;
  action: Action<[], unknown>;
  // Read out when it is done: the outcome in a sentence, in place of its table.
  said: string | null;
  fields: ComponentChildren;
  // The answer; null before there is one.
  children: ComponentChildren;
  samples?: Record<string, string>;
}

export function TryForm({ id, title, note, verb, action, said, fields, children, samples }: TryFormProps) {
  return (
    <Grid>
      <Card title={title} note={note} span={5}>
        <form
          id={`${id}-form`}
          class="stack"
          autocomplete="off"
          noValidate
          onSubmit={(event) => {
            event.preventDefault();
            action.run();
          }}
        >
          {fields}
          <div>
            <Button kind="primary" type="submit" icon={Play} busy={action.busy}>
              {verb}
            </Button>
          </div>
        </form>
      </Card>
      <Card title="Answer" span={7} id={`${id}-answer`}>
        <p class="unseen" role="status">
          {action.busy ? "Working …" : !action.problem && said}
        </p>
        <Problem>{action.problem?.message}</Problem>
        {action.busy && !children && <Skeleton rows={4} />}
        {!action.problem && (children || (!action.busy && <Empty title="Nothing sent yet">{`“${verb}” sends the form to the gateway with your key; it is counted like every call.`}</Empty>))}
      </Card>
      {samples && (
        <Card title="Code of this call">
          <Code samples={samples} />
        </Card>
      )}
    </Grid>
  );
}
