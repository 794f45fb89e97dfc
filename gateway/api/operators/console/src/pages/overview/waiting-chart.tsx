// What waits and what is in flight, in the last hour: the history of longer times has no such moments.
import { useMemo } from "preact/hooks";
import { short } from "../../lib/format.ts";
import type { TrafficPoint } from "../../lib/traffic.ts";
import { Card } from "../../ui/card.tsx";
import { Chart } from "../../ui/chart.tsx";
import { Skeleton } from "../../ui/states.tsx";

export function WaitingChart({ points }: { points: TrafficPoint[] | null }) {
  const content = useMemo(
    () =>
      points && {
        times: points.map(({ at_s }) => at_s),
        series: [
          { name: "calls in flight", values: points.map((point) => point.calls_in_flight), color: "series-1", isArea: true },
          { name: "inputs waiting", values: points.map((point) => point.queued_inputs), color: "series-2", dash: [8, 4] },
        ],
      },
    [points],
  );
  return (
    <Card title="Waiting and in flight" note="The last hour" span={6}>
      {content ? (
        <Chart title="Waiting and in flight" {...content} format={short} empty="The chart begins half a minute after the start" />
      ) : (
        <Skeleton rows={1} height={216} />
      )}
    </Card>
  );
}
