// The playground: a tab for each way to use the models, of those that the key and the models can.
import { FileSearch, Grid3x3, Image, KeyRound, ListOrdered, ScanText, Scale } from "lucide";
import type { ComponentType } from "preact";
import { setQuery, useParam } from "../../lib/route.ts";
import { type ListedModel, useAccess } from "../../shell/access.ts";
import { Page } from "../../ui/page.tsx";
import { Empty, Failure, Skeleton } from "../../ui/states.tsx";
import { type Tab, Tabs } from "../../ui/tabs.tsx";
import { CompareTab } from "./compare-tab.tsx";
import { EmbedTab } from "./embed-tab.tsx";
import { able } from "./models.ts";
import { PagesTab } from "./pages-tab.tsx";
import { PicturesTab } from "./pictures-tab.tsx";
import { RerankTab } from "./rerank-tab.tsx";
import { SearchTab } from "./search-tab.tsx";

interface TryTab extends Tab {
  show: ComponentType<{ models: ListedModel[] }>;
  models: ListedModel[];
  // Models that it needs.
  least?: number;
}

function tabsFor(models: ListedModel[]): TryTab[] {
  const pictured = able(models, "embed_image");
  const embedding = able(models, "embed");
  const tabs: TryTab[] = [
    { name: "embed", title: "Embed and compare", icon: Grid3x3, show: EmbedTab, models: embedding },
    { name: "rerank", title: "Rerank", icon: ListOrdered, show: RerankTab, models: able(models, "rerank") },
    { name: "search", title: "Search a file", icon: FileSearch, show: SearchTab, models: embedding },
    { name: "pictures", title: "Pictures", icon: Image, show: PicturesTab, models: able(pictured, "embed") },
    { name: "pages", title: "Pages", icon: ScanText, show: PagesTab, models: able(pictured, "encode") },
    { name: "models", title: "Models side by side", icon: Scale, show: CompareTab, models: embedding, least: 2 },
  ];
  return tabs.filter((tab) => tab.models.length >= (tab.least ?? 1));
}

export function Playground() {
  const { models, problem, hasKey } = useAccess();
  const [wanted] = useParam("tab", "embed");
  const tabs = tabsFor(models ?? []);
  const tab = tabs.find(({ name }) => name === wanted) ?? tabs[0];
  const content = () => {
    if (!hasKey) {
      return (
        <Empty title="Sign in to try the models" icon={KeyRound}>
          Calls of the playground are counted, limited and logged like all others, so they need a key.
        </Empty>
      );
    }
    if (problem) return <Failure id="models-problem" problem={problem} />;
    if (!models) return <Skeleton rows={6} />;
    if (!tab) return <Empty title="This key can use no model">Ask an operator for a key with the models that you need.</Empty>;
    return (
      <>
        <Tabs label="Ways to use the models" tabs={tabs} chosen={tab.name} onChoose={(name) => setQuery({ tab: name === "embed" ? null : name, model: null })} />
        <div class="tab-content">
          <tab.show key={tab.name} models={tab.models} />
        </div>
      </>
    );
  };
  return (
    <Page title="Playground" note="Try the models with your own texts. Nothing typed here is stored or logged.">
      {content()}
    </Page>
  );
}
