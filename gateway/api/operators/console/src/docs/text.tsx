// A text of the document: paragraphs, with `code` between backticks.
export function Inline({ text }: { text: string }) {
  return <>{text.split("`").map((part, index) => (index % 2 ? <code key={index}>{part}</code> : part))}</>;
}

export function Text({ text }: { text: string }) {
  return (
    <>
      {text
        .split("\n\n")
        .filter(Boolean)
        .map((paragraph, index) => (
          <p key={index} class="prose">
            <Inline text={paragraph.replaceAll(/\s+/g, " ")} />
          </p>
        ))}
    </>
  );
}
