// A text that may be long: its end is cut, the whole is in the title.
export const Clip = ({ text, class: name = "" }: { text: string; class?: string }) => (
  <bdi class={`clip ${name}`} title={text} dir="auto">
    {text}
  </bdi>
);
