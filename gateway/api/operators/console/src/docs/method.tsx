// The method of an operation, in a color of its class. The word says all.
export const Method = ({ name }: { name: string }) => <span class={`method method-${name.toLowerCase()}`}>{name}</span>;
